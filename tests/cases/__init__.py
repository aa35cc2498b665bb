"""What declarations cannot know: sensible values, oracles and hazards, one module per family."""

from cases import kda

SUBJECTS = {subject.name: subject for subject in kda.SUBJECTS}

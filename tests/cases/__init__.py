"""What declarations cannot know: sensible values, oracles and hazards, one module per family."""

from cases import gla, kda, simple_gla

SUBJECTS = {subject.name: subject for subject in (*kda.SUBJECTS, *simple_gla.SUBJECTS, *gla.SUBJECTS)}

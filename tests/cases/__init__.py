"""What declarations cannot know: sensible values, oracles and hazards, one module per family."""

from cases import chunks, delta_rule, gla, kda, rows, simple_gla

FAMILIES = (kda, simple_gla, gla, delta_rule, chunks, rows)
SUBJECTS = {subject.name: subject for family in FAMILIES for subject in family.SUBJECTS}

"""What declarations cannot know: sensible values, oracles and hazards, one module per family."""

from cases import chunks, delta_rule, gla, kda, linear_attn, rows, rwkv6, simple_gla

FAMILIES = (kda, simple_gla, gla, delta_rule, linear_attn, rwkv6, chunks, rows)
SUBJECTS = {subject.name: subject for family in FAMILIES for subject in family.SUBJECTS}

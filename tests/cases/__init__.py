"""What declarations cannot know: sensible values, oracles and hazards, one module per family."""

from cases import delta_rule, gla, kda, linear_attn, rwkv6, simple_gla

FAMILIES = (kda, simple_gla, gla, delta_rule, linear_attn, rwkv6)
SUBJECTS = {subject.name: subject for family in FAMILIES for subject in family.SUBJECTS}

import torch

import facade.ops as fla_ops

q, k, v = (torch.randn(1, 4, 1, 8) for _ in range(3))
o, _ = fla_ops.fused_recurrent_kda(q, k, v, g=-torch.rand(1, 4, 1, 8), beta=torch.rand(1, 4, 1))
assert o.shape == v.shape and o.isfinite().all()

import json, sys
import hop_tmp
from hop_tmp import *
name, variant = "ncu", json.loads(sys.argv[1])
use(load(name, **variant))
q, qo, k, v, o = bench.inputs(64, 8192, 8, 128, 128)
cache = rotatekv_compress(k, v, o)
for _ in range(6):
    bench.attend("fused", q, qo, cache, 8192)
torch.cuda.synchronize()

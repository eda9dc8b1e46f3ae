import sys, time
from tests import checks
from tests.cudnn_cases import CASES, WIDE
from flash_pallas.backends.cudnn import CudnnBackend
b = CudnnBackend(capability="9.0", version=91900, implementation="xla")
for c in (*CASES,*WIDE):
    t=time.time()
    try:
        checks.assert_matches_oracle(checks.bind(b), c); r="ok"
    except AssertionError as e: r=str(e)[:400]
    except Exception as e: r=repr(e)[:600]
    print(f"{c.name:28s} {time.time()-t:5.1f}s {r}", flush=True)

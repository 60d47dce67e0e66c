import sys
from tests.operators import bsa
import tests.test_campaign as c
case = [x for n, x in c.FIXED if n == "bsa"][int(sys.argv[1])]
bsa.check("cuda", **case)
print("fixed case", sys.argv[1], "holds", flush=True)

// In front of every program: products are not fused with sums (docs/numerics.md).
#pragma OPENCL FP_CONTRACT OFF

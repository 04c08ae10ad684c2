// The update rules of smartinf/kernels/arithmetic.h, the one text of the arithmetic, over the
// numbers of float32.h.
#pragma once

#include "fpga/kernels/float32.h"

#define SI_F32 smartinf::fpga::Float32
#define SI_UINT_OF(value) (value).bits()
#define SI_FLOAT_OF(bits) smartinf::fpga::Float32::of_bits(bits)
#define SI_SQRT(value) square_root(value)

#include "smartinf/kernels/arithmetic.h"

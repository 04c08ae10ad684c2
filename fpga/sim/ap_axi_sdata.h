// The part of Xilinx' <ap_axi_sdata.h> that our kernels use: what goes over a stream between two
// kernels.
#pragma once

#include "ap_int.h"

template <int kData, int kUser, int kId, int kDest>
struct ap_axiu {
  ap_uint<kData> data;
  ap_uint<kData / 8> keep;
  ap_uint<1> last;
};

// Which of Highway's targets the kernels are compiled for. To be included before any of Highway's
// headers. SVE's vectors have no size at compile time and cannot be members, as the update rules'
// scalars are; processors with SVE run NEON. SSSE3 would serve only
// x86 processors that lack SSE4.2 or AES, which run the scalar reference.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

// The texts of OpenCL programs.
#pragma once

namespace smartinf::csd::opencl {

extern const char* const kCommonText;  // arithmetic, structs, checksums, tiles
extern const char* const kUpdateText;
extern const char* const kPlanesText;
extern const char* const kFoldText;

}  // namespace smartinf::csd::opencl

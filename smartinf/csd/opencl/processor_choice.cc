// `device.processor` by name.
#include <string>

#include <fmt/format.h>

#include "smartinf/csd/opencl_processor.h"

namespace smartinf::csd {

base::Result<ProcessorChoice> parse_processor(std::string_view text) {
  constexpr std::string_view kOpenCl = "opencl";
  if (text == "cpu") return ProcessorChoice{};
  if (text == kOpenCl) return ProcessorChoice{.opencl = true, .device = {}};
  if (text.starts_with(kOpenCl) && text.size() > kOpenCl.size() + 1 &&
      text[kOpenCl.size()] == ':') {
    return ProcessorChoice{.opencl = true, .device = std::string(text.substr(kOpenCl.size() + 1))};
  }
  return base::Status(base::ErrorCode::kInvalidArgument,
                      fmt::format("\"{}\" is no processor", text),
                      "There are \"cpu\", \"opencl\" and \"opencl:DEVICE\" with a part of a "
                      "device's name or its number, as smartinf doctor lists them.");
}

}  // namespace smartinf::csd

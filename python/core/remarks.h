// The core's log for Python. Its threads must not wait for the GIL, so remarks are collected here
// and handed to Python's logging by the calls that open and close devices.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace smartinf::python {

/// Installs the sink. Bound: the oldest kRemarksMax are kept until they are taken.
inline constexpr size_t kRemarksMax = 100;
void collect_remarks();

/// ("debug", "info" or "warning", text), oldest first; each is given once.
std::vector<std::pair<std::string, std::string>> take_remarks();

}  // namespace smartinf::python

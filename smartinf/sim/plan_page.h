// plan_report.html, compiled in so that the command needs no data folder.
#pragma once

#include <string_view>

namespace smartinf::sim {

std::string_view plan_page();

}  // namespace smartinf::sim

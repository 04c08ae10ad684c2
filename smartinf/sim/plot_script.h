// scripts/plot_figure.py, compiled in so that an installed command can draw, too.
#pragma once

#include <string_view>

namespace smartinf::sim {

std::string_view plot_script();

}  // namespace smartinf::sim

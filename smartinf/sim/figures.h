// The paper's figures as rows: the simulator's line, and the paper's points where they were given.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

struct FigureRow {
  std::string panel;   // one plot of the figure
  std::string series;  // one line or colour of it
  std::string x;       // category or number on the axis
  std::string model;
  std::string gpu;
  uint32_t devices = 0;
  double forward_s = 0, backward_s = 0, update_s = 0, total_s = 0;
  double value = 0;             // what is plotted: seconds, a speed-up, a share, GFLOPS per dollar
  double paper = -1;            // the paper's value of the same; below 0: not given
  double paper_forward_s = 0;   // of a step: 0: not given
  double paper_computed_s = 0;  // forward and backward
};

struct Figure {
  uint32_t number = 0;
  std::string title;
  std::string basis;  // what it is held against: the paper's points, or nothing
  std::string x_label;
  std::string y_label;
  bool stacked = false;  // bars of forward, backward and update; else lines of value
  std::vector<FigureRow> rows;
};

/// Numbers that can be asked for.
std::vector<uint32_t> figure_numbers();

/// Errors: kNotFound for another number.
base::Result<Figure> make_figure(uint32_t number);

std::string figure_to_csv(const Figure& figure);
std::string figure_to_json(const Figure& figure);

}  // namespace smartinf::sim

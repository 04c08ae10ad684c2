// Runs an update rule over files of numbers, for tests/python/kernels_parity_test.py, which runs
// torch.optim over the same. No part of the product.
//
//   kernels_parity RULE OPTION=VALUE... elements=N steps=S initial=FILE gradients=FILE out=FILE
//
// initial: [N] f32 master weights; gradients: [S, N] f32; out: [planes, N] f32, the final state.
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "smartinf/kernels/update.h"

namespace {

using namespace smartinf;

std::vector<float> read_floats(const std::string& path, size_t count) {
  std::vector<float> values(count);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()),
            static_cast<std::streamsize>(count * sizeof(float)));
  SI_CHECK(file.good(), "cannot read " + path);
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    SI_CHECK(equals != std::string::npos, "arguments are OPTION=VALUE");
    given[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  const auto number = [&](const std::string& name, double otherwise) {
    return given.contains(name) ? std::stod(given[name]) : otherwise;
  };
  const auto rule = kernels::update_rule_from_name(argc > 1 ? argv[1] : "");
  SI_CHECK(rule.has_value(), "the first argument is an update rule");
  const kernels::RuleOptions options{
      .rule = *rule,
      .beta1 = number("beta1", 0.9),
      .beta2 = number("beta2", 0.999),
      .eps = number("eps", 1e-8),
      .dampening = number("dampening", 0),
      .nesterov = number("nesterov", 0) != 0,
      .maximize = number("maximize", 0) != 0,
      .lr_decay = number("lr_decay", 0),
      .initial_accumulator_value = number("initial_accumulator_value", 0)};
  const kernels::GroupOptions group{.lr = number("lr", 1e-3),
                                    .weight_decay = number("weight_decay", 0)};
  const auto n = static_cast<size_t>(number("elements", 0));
  const auto steps = static_cast<size_t>(number("steps", 0));
  SI_CHECK(n <= base::kBlockElements, "one block at most");
  const std::vector<float> gradients = read_floats(given["gradients"], n * steps);
  std::vector<std::vector<float>> planes = {read_floats(given["initial"], n)};
  planes.resize(kernels::rule_planes(*rule).size(), std::vector<float>(n));

  kernels::UpdateBlock block{.count = n, .gradient_type = base::DataType::kF32};
  for (size_t i = 0; i < planes.size(); ++i) {
    block.planes[i] = reinterpret_cast<std::byte*>(planes[i].data());
  }
  for (size_t step = 1; step <= steps; ++step) {
    const kernels::StepScalars scalars = kernels::make_step_scalars(options, group, step, 1, 0);
    const kernels::ScalarsSpan run{n, &scalars};
    block.gradient = gradients.data() + (step - 1) * n;
    kernels::kernels().update_block(base::StateFormat::kF32, block, {&run, 1});
  }
  std::ofstream out(given["out"], std::ios::binary);
  for (const std::vector<float>& plane : planes) {
    out.write(reinterpret_cast<const char*>(plane.data()),
              static_cast<std::streamsize>(n * sizeof(float)));
  }
  out.flush();
  SI_CHECK(out.good(), "cannot write " + given["out"]);
  return 0;
}

// Runs an update rule over files of numbers, for tests/python/kernels_parity_test.py, which runs
// torch.optim over the same. No part of the product.
//
//   kernels_parity RULE OPTION=VALUE... elements=N steps=S initial=FILE gradients=FILE out=FILE
//
// initial: [N] f32 master weights; gradients: [S, N] f32; out: [planes, N] f32, the final state.
// With dim=D ids=FILE batch=B, the N weights are a table's rows: RULE is a row rule, ids: [S, B]
// u32, gradients: [S, B, D]; out: [N / D] records.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "smartinf/kernels/row_rules.h"
#include "smartinf/kernels/update.h"

namespace {

using namespace smartinf;

template <typename T>
std::vector<T> read_numbers(const std::string& path, size_t count) {
  std::vector<T> values(count);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()),
            static_cast<std::streamsize>(count * sizeof(T)));
  SI_CHECK(file.good(), "cannot read " + path);
  return values;
}

void update_rows(const kernels::RowOptions& options, double lr, size_t steps, size_t dim,
                 const std::vector<uint32_t>& ids, const std::vector<float>& gradients,
                 const std::vector<float>& initial, std::ostream& out) {
  const size_t rows = initial.size() / dim;
  const size_t batch = ids.size() / steps;
  std::vector<std::vector<std::byte>> records(
      rows, std::vector<std::byte>(kernels::record_bytes(options.rule, dim)));
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(records[row].data(), initial.data() + row * dim, dim * sizeof(float));
  }
  for (size_t step = 1; step <= steps; ++step) {
    const size_t first = (step - 1) * batch;
    const auto scalars = kernels::make_row_scalars(options, lr, step, 1);
    std::vector<float> sums(initial.size(), kernels::kNoGradient);
    kernels::add_rows(base::DataType::kF32, gradients.data() + first * dim,
                      std::span(ids).subspan(first, batch), dim, sums);
    for (const uint32_t row : std::set(ids.begin() + static_cast<ptrdiff_t>(first),
                                       ids.begin() + static_cast<ptrdiff_t>(first + batch))) {
      kernels::update_record(scalars, std::span(sums).subspan(row * dim, dim), records[row]);
    }
  }
  for (const std::vector<std::byte>& record : records) {
    out.write(reinterpret_cast<const char*>(record.data()),
              static_cast<std::streamsize>(record.size()));
  }
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
  const std::string name = argc > 1 ? argv[1] : "";
  std::ofstream out(given["out"], std::ios::binary);
  const auto n = static_cast<size_t>(number("elements", 0));
  const auto steps = static_cast<size_t>(number("steps", 0));
  if (given.contains("ids")) {
    const auto rule = kernels::row_rule_from_name(name);
    SI_CHECK(rule.has_value(), "the first argument is a row rule");
    const auto dim = static_cast<size_t>(number("dim", 0));
    const size_t ids = steps * static_cast<size_t>(number("batch", 0));
    update_rows({.rule = *rule,
                 .beta1 = number("beta1", 0.9),
                 .beta2 = number("beta2", 0.999),
                 .eps = number("eps", 1e-8)},
                number("lr", 1e-3), steps, dim, read_numbers<uint32_t>(given["ids"], ids),
                read_numbers<float>(given["gradients"], ids * dim),
                read_numbers<float>(given["initial"], n), out);
    out.flush();
    SI_CHECK(out.good(), "cannot write " + given["out"]);
    return 0;
  }
  const auto rule = kernels::update_rule_from_name(name);
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
  SI_CHECK(n <= base::kBlockElements, "one block at most");
  const std::vector<float> gradients = read_numbers<float>(given["gradients"], n * steps);
  std::vector<std::vector<float>> planes = {read_numbers<float>(given["initial"], n)};
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
  for (const std::vector<float>& plane : planes) {
    out.write(reinterpret_cast<const char*>(plane.data()),
              static_cast<std::streamsize>(n * sizeof(float)));
  }
  out.flush();
  SI_CHECK(out.good(), "cannot write " + given["out"]);
  return 0;
}

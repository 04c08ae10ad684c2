// Messages between ranks, as bytes (base/codec.h): all ranks of a run are the same program.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "smartinf/base/codec.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::kernels {

template <typename Wire>
void describe(Wire& wire, RuleOptions& options) {
  auto& [rule, beta1, beta2, eps, dampening, nesterov, maximize, lr_decay,
         initial_accumulator_value] = options;
  wire(base::choice(rule, UpdateRule::kLion), beta1, beta2, eps, dampening, nesterov, maximize,
       lr_decay, initial_accumulator_value);
}
template <typename Wire>
void describe(Wire& wire, GroupOptions& options) {
  auto& [lr, weight_decay, skip, step, rule] = options;
  wire(lr, weight_decay, skip, step, rule);
}

}  // namespace smartinf::kernels

namespace smartinf::plan {

template <typename Wire>
void describe(Wire& wire, ParameterRange& range) {
  auto& [name, shape, first, count, group] = range;
  wire(name, shape, first, count, group);
}

}  // namespace smartinf::plan

namespace smartinf::engine {

template <typename... T>
std::string pack(const T&... values) {
  base::Encoder encoder;
  encoder(values...);
  const std::vector<std::byte> bytes = encoder.take();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Unpacks what pack() made, or what begins with it. Errors: kCorrupt; the values must not be used
/// then.
template <typename... T>
base::Status unpack(std::string_view text, T&... values) {
  base::Decoder decoder(std::as_bytes(std::span(text)));
  decoder(values...);
  if (decoder.ok()) return base::Status();
  return base::Status(base::ErrorCode::kCorrupt, "a rank sent what this program cannot read",
                      "Start all ranks with the same program.");
}

}  // namespace smartinf::engine

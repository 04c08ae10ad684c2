// The ranks of a script as engine::Collectives: its calls are made by Python, over the process
// group that the script has, so that the module needs no torch.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include <nanobind/nanobind.h>

#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::python {

/// Threads: any. Python is called with the GIL, which torch lets go while it waits.
class PyRanks final : public engine::Collectives {
 public:
  /// calls: a RankCalls of smartinf/rank_calls.py. What it raises is the error of the call: the
  /// engine sees no exception.
  PyRanks(uint32_t rank, uint32_t world, nanobind::object calls)
      : rank_(rank), world_(world), calls_(std::move(calls)) {}

  /// With the GIL, for Python: documented in module.cc.
  void all_ok(const std::string& call, const nanobind::object& failure);

  uint32_t rank() const override { return rank_; }
  uint32_t world() const override { return world_; }
  Started all_to_all(engine::Channel channel, std::span<const std::byte> send,
                     std::span<const uint64_t> send_bytes, std::span<std::byte> receive,
                     std::span<const uint64_t> receive_bytes) override;
  /// kUnsupported: gradients and weights of parameters are exchanged by Python.
  Started broadcast(engine::Channel channel, std::span<std::byte> bytes, uint32_t root) override;
  Started all_gather(engine::Channel channel, std::span<const std::byte> mine,
                     std::span<std::byte> all) override;
  base::Status barrier(engine::Channel channel) override;
  void failed(const base::Status& why) override;

 private:
  /// Raises what ends the program (KeyboardInterrupt) once the engine has returned.
  void raise_interrupt();

  const uint32_t rank_;
  const uint32_t world_;
  const nanobind::object calls_;
  std::exception_ptr interrupt_;  // of a call on kControl; with the GIL
};

}  // namespace smartinf::python

// Updaters over devices of every kind, for tests of what they all do.
#pragma once

#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smartinf/base/test_all.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/test_model.h"

namespace smartinf::engine {

class DevicesPlace final : public StatePlace {
 public:
  explicit DevicesPlace(const Variant& variant, bool stream_weights = false)
      : in_memory_(variant.in_memory), options_(options_of(variant, scratch_)) {
    options_.stream_weights = stream_weights;
    // Reading takes some of it.
    if (stream_weights) options_.memory_budget_bytes += variant.devices * base::kMiB;
  }

  base::Result<std::unique_ptr<Updater>> open() override {
    if (!in_memory_) return Updater::open(options_, contract_space());
    while (drives_.size() < options_.devices.size()) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(64 * base::kMiB));
      drives_.push_back(std::move(drive));
    }
    return Updater::open(options_, contract_space(), emulated_sources(options_, drives_));
  }

 private:
  const Scratch scratch_;
  const bool in_memory_;
  UpdaterOptions options_;
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
};

class FakesPlace final : public StatePlace {
 public:
  explicit FakesPlace(bool stream_weights = false) { options_.stream_weights = stream_weights; }

  base::Result<std::unique_ptr<Updater>> open() override {
    options_.subgroup_elements = kBlock;
    std::vector<std::unique_ptr<DeviceSource>> sources;
    for (size_t d = 0; d < drives_.size(); ++d) {
      sources.push_back(std::make_unique<FakeSource>(drives_[d], "drive" + std::to_string(d)));
    }
    return Updater::open(options_, contract_space(), std::move(sources));
  }
  UpdaterOptions& options() { return options_; }
  FakeDrive& drive(size_t device) { return *drives_[device]; }

 private:
  UpdaterOptions options_;
  const std::vector<std::shared_ptr<FakeDrive>> drives_ = {std::make_shared<FakeDrive>(),
                                                           std::make_shared<FakeDrive>()};
};

inline const Variant kVariants[] = {
    {.name = "OneDevice"},
    {.name = "TwoDevices", .devices = 2},
    {.name = "ThreeDevices", .devices = 3},
    {.name = "SmallestSubgroups", .devices = 2, .subgroup_elements = kBlock},
    {.name = "OneSubgroup", .subgroup_elements = 64 * kBlock, .memory_budget_bytes = base::kGiB},
    {.name = "LeastMemory", .subgroup_elements = kBlock, .memory_budget_bytes = 8 * base::kMiB},
    {.name = "Naive", .devices = 2, .schedule = plan::ScheduleVariant::kNaive},
    {.name = "ThreadRing", .devices = 2, .ring = storage::RingKind::kThreads},
    {.name = "Spilled", .devices = 2, .gradient_budget_bytes = 0},
    {.name = "SpilledInSmallSubgroups", .subgroup_elements = kBlock, .gradient_budget_bytes = 0},
    {.name = "HalfSpilled", .gradient_budget_bytes = 2 * base::kMiB},
    {.name = "InPlace", .devices = 2, .durability = storage::Durability::kNone},
    {.name = "NoChecksums", .checksums = false},
    {.name = "F32Gradients", .gradient_type = DataType::kF32},
    {.name = "HostUpdate", .devices = 2, .where = UpdateWhere::kHost},
    {.name = "HostUpdateAsInThePaper",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .gradient_type = DataType::kF32,
     .gradient_budget_bytes = 0},
    {.name = "HostUpdateNaive",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .schedule = plan::ScheduleVariant::kNaive},
    {.name = "UnequalDevices", .devices = 3, .subgroup_elements = kBlock, .unequal = true},
    {.name = "InMemory", .devices = 2, .in_memory = true},
    {.name = "InMemoryHostUpdate",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .in_memory = true},
    {.name = "BehindLinks", .devices = 2, .behind_links = true},
    {.name = "InMemoryBehindLinks", .devices = 3, .in_memory = true, .behind_links = true},
    {.name = "HostUpdateBehindLinks",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true},
    {.name = "InMemoryHostUpdateBehindLinks",
     .devices = 3,
     .where = UpdateWhere::kHost,
     .in_memory = true,
     .behind_links = true},
    {.name = "AllCached", .devices = 2, .in_memory = true, .state_cache_bytes = base::kGiB},
    {.name = "UnequalDevicesHalfCached",
     .devices = 3,
     .subgroup_elements = kBlock,
     .in_memory = true,
     .unequal = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "HostUpdateSpilledHalfCached",
     .devices = 2,
     .where = UpdateWhere::kHost,
     .gradient_budget_bytes = 0,
     .behind_links = true,
     .state_cache_bytes = kHalfOfState},
    {.name = "InPlaceHalfCached",
     .devices = 2,
     .subgroup_elements = kBlock,
     .durability = storage::Durability::kNone,
     .state_cache_bytes = kHalfOfState},
};

/// For each change, of what differs in a combination only: those with the most in them.
inline std::vector<Variant> variants() {
  std::vector<Variant> all(std::begin(kVariants), std::end(kVariants));
  constexpr std::string_view kLeftOut[] = {"OneDevice",
                                           "TwoDevices",
                                           "ThreeDevices",
                                           "OneSubgroup",
                                           "Naive",
                                           "Spilled",
                                           "HalfSpilled",
                                           "InPlace",
                                           "NoChecksums",
                                           "F32Gradients",
                                           "HostUpdate",
                                           "HostUpdateNaive",
                                           "HostUpdateAsInThePaper",
                                           "UnequalDevices",
                                           "InMemory",
                                           "InMemoryHostUpdate",
                                           "BehindLinks",
                                           "AllCached",
                                           "InMemoryBehindLinks",
                                           "HostUpdateBehindLinks"};
  base::leave_for_the_night(all, kLeftOut);
  return all;
}

inline std::vector<UpdaterKind> all_kinds(bool stream_weights = false) {
  std::vector<UpdaterKind> kinds;
  for (const Variant& variant : variants()) {
    UpdaterKind& kind = kinds.emplace_back();
    kind.name = variant.name;
    kind.make_place = [variant, stream_weights] {
      return std::make_unique<DevicesPlace>(variant, stream_weights);
    };
    kind.reference = [type = variant.gradient_type]() -> const Outcome& { return reference(type); };
    kind.in_place = variant.durability == storage::Durability::kNone;
  }
  UpdaterKind& fakes = kinds.emplace_back();
  fakes.name = "Fakes";
  fakes.make_place = [stream_weights] { return std::make_unique<FakesPlace>(stream_weights); };
  fakes.reference = []() -> const Outcome& { return reference(DataType::kBf16); };
  return kinds;
}

}  // namespace smartinf::engine

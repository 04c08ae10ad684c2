// Several ranks as one Updater, for tests of what every updater does: each call is made by all of
// them, each on a thread of its own, and they have to agree in everything that comes of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/test_all.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/fake_source.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/ranks/test_collectives.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/updater_kinds.h"
#include "smartinf/engine/whole_state.h"

namespace smartinf::engine {

/// call(rank) on a thread for each of them.
template <typename Call>
void on_all_ranks(size_t ranks, const Call& call) {
  std::vector<std::jthread> threads;
  for (size_t rank = 1; rank < ranks; ++rank) {
    threads.emplace_back([&call, rank] { call(rank); });
  }
  call(size_t{0});
}

class Crew final : public Updater {
 public:
  Crew(std::shared_ptr<Board> board, std::vector<std::unique_ptr<Updater>> ranks)
      : board_(std::move(board)), ranks_(std::move(ranks)), memory_(ranks_.size()) {}
  ~Crew() override {
    on_all_ranks(ranks_.size(), [&](size_t rank) { ranks_[rank].reset(); });
  }

  Board& board() { return *board_; }
  Updater& rank(size_t rank) { return *ranks_[rank]; }
  /// Makes a call on all ranks; returns what each says.
  template <typename Call>
  std::vector<base::Status> each(const Call& call) {
    std::vector<base::Status> said(ranks_.size());
    on_all_ranks(ranks_.size(), [&](size_t rank) { said[rank] = call(rank, *ranks_[rank]); });
    return said;
  }
  /// Makes a call on all ranks, which must say the same; returns it.
  template <typename Call>
  base::Status all(const Call& call) {
    const std::vector<base::Status> said = each(call);
    for (const base::Status& status : said) {
      EXPECT_EQ(status.to_string(), said.front().to_string());
    }
    return said.front();
  }

  bool fresh() const override { return first().fresh(); }
  base::StepNumber committed_step() const override {
    for (const auto& rank : ranks_) EXPECT_EQ(rank->committed_step(), first().committed_step());
    return first().committed_step();
  }
  std::string client_metadata() const override {
    for (const auto& rank : ranks_) EXPECT_EQ(rank->client_metadata(), first().client_metadata());
    return first().client_metadata();
  }
  const plan::ParameterSpace& space() const override { return first().space(); }

  base::Status initialize(const FillWeights& fill, const std::string& client_metadata) override {
    return all([&](size_t, Updater& updater) { return updater.initialize(fill, client_metadata); });
  }
  base::Status read_state(uint32_t plane_mask, const WholeState::Visit& visit) override {
    using Planes = std::vector<std::vector<float>>;
    std::vector<Planes> read(ranks_.size());
    const base::Status status = all([&](size_t rank, Updater& updater) {
      return updater.read_state(
          plane_mask, [&](uint64_t at, std::span<const std::span<const float>> pieces) {
            read[rank].resize(pieces.size());
            for (size_t p = 0; p < pieces.size(); ++p) {
              read[rank][p].insert(read[rank][p].end(), pieces[p].begin(), pieces[p].end());
            }
            return rank == 0 ? visit(at, pieces) : base::Status();
          });
    });
    for (const Planes& planes : read) EXPECT_TRUE(!status.ok() || planes == read.front());
    return status;
  }
  base::Status edit_state(const WholeState::Edit& edit, const std::string& client_metadata,
                          const CompressionState& compression) override {
    return all([&](size_t, Updater& updater) {
      return updater.edit_state(edit, client_metadata, compression);
    });
  }
  base::Status read_weights(
      const std::function<base::Status(uint64_t, std::span<const float>)>& visit) override {
    return all([&](size_t rank, Updater& updater) {
      return updater.read_weights(rank == 0 ? visit : nullptr);
    });
  }
  base::Status load_weights(base::DataType type, const WeightsSink& sink) override {
    const auto status = all([&](size_t rank, Updater& updater) {
      return updater.load_weights(type, sink_of(rank, type, sink));
    });
    if (status.ok()) expect_same_weights(0, space().count());
    return status;
  }

  base::Status begin_step() override {
    return all([&](size_t, Updater& updater) { return updater.begin_step(); });
  }
  /// Each rank has the values of some elements, and minus zero elsewhere.
  base::Status put_gradient(uint64_t at, const void* gradient, base::DataType type,
                            uint64_t count) override {
    const uint64_t bytes = base::data_type_bytes(type);
    return all([&](size_t rank, Updater& updater) {
      // Gradients outside of the space are refused, and there is nothing to be copied.
      const bool inside = at <= space().count() && count <= space().count() - at;
      std::vector<std::byte> mine(inside ? count * bytes : 0);
      for (uint64_t i = 0; inside && i < count; ++i) {
        const bool given = (at + i) % ranks_.size() == rank;
        const auto* value = static_cast<const std::byte*>(gradient) + i * bytes;
        if (given) std::memcpy(mine.data() + i * bytes, value, bytes);
        if (!given) mine[(i + 1) * bytes - 1] = std::byte{0x80};
      }
      return updater.put_gradient(at, mine.data(), type, count);
    });
  }
  base::Status skip_gradient(uint64_t at, uint64_t count) override {
    return all([&](size_t, Updater& updater) { return updater.skip_gradient(at, count); });
  }
  base::Result<GradientSummary> finish_gradients(double unscale) override {
    std::vector<GradientSummary> found(ranks_.size());
    SI_RETURN_IF_ERROR(all([&](size_t rank, Updater& updater) -> base::Status {
      SI_ASSIGN_OR_RETURN(found[rank], updater.finish_gradients(unscale));
      return base::Status();
    }));
    for (const GradientSummary& other : found) {
      EXPECT_EQ(other.finite, found.front().finite);
      EXPECT_EQ(other.first_bad, found.front().first_bad);
      EXPECT_TRUE(other.norm == found.front().norm || !other.finite);
    }
    return found.front();
  }
  base::Status early_update_possible() const override { return first().early_update_possible(); }
  base::Status start_early_update(const UpdateOptions& guess, base::DataType type,
                                  const WeightsSink& sink, double norm_max) override {
    return all([&](size_t, Updater& updater) {
      return updater.start_early_update(guess, type, sink, norm_max);
    });
  }
  base::Status start_update(const UpdateOptions& options, base::DataType type,
                            const WeightsSink& sink) override {
    return all([&](size_t rank, Updater& updater) {
      return updater.start_update(options, type, sink_of(rank, type, sink));
    });
  }
  base::Status wait_weights(uint64_t at, uint64_t count) override {
    const auto status =
        all([&](size_t, Updater& updater) { return updater.wait_weights(at, count); });
    if (status.ok()) expect_same_weights(at, count);
    return status;
  }
  plan::Subgroup subgroup_at(uint64_t element) const override {
    return first().subgroup_at(element);
  }
  base::Status fetch_weights(uint64_t at, base::DataType type, void* out) override {
    auto& fetched = fetched_[at];
    fetched.resize(ranks_.size());
    const uint64_t bytes = subgroup_at(at).count * base::data_type_bytes(type);
    return all([&](size_t rank, Updater& updater) {
      if (rank > 0) fetched[rank].assign(bytes, std::byte{0});
      return updater.fetch_weights(at, type, rank > 0 ? fetched[rank].data() : (out_[at] = out));
    });
  }
  base::Status wait_fetched(uint64_t at) override {
    const auto status = all([&](size_t, Updater& updater) { return updater.wait_fetched(at); });
    const auto& fetched = fetched_[at];
    for (size_t rank = 1; status.ok() && rank < fetched.size(); ++rank) {
      EXPECT_EQ(std::memcmp(fetched[rank].data(), out_[at], fetched[rank].size()), 0);
    }
    return status;
  }
  base::Status start_commit(const std::string& client_metadata) override {
    return all([&](size_t, Updater& updater) { return updater.start_commit(client_metadata); });
  }
  bool committing() const override { return first().committing(); }
  base::Status wait_commit() override {
    return all([&](size_t, Updater& updater) { return updater.wait_commit(); });
  }
  base::Status flush() override {
    return all([&](size_t, Updater& updater) { return updater.flush(); });
  }
  base::Status abort() override {
    return all([&](size_t, Updater& updater) { return updater.abort(); });
  }

  UpdaterTraffic traffic() const override {
    UpdaterTraffic sum;
    for (const auto& rank : ranks_) {
      const UpdaterTraffic traffic = rank->traffic();
      sum.host_link += traffic.host_link;
      sum.store += traffic.store;
      sum.ranks += traffic.ranks;
    }
    return sum;
  }
  uint64_t bytes_written_ever() const override { return first().bytes_written_ever(); }
  uint64_t memory_bytes() const override { return first().memory_bytes(); }
  uint64_t gradient_memory_bytes() const override { return first().gradient_memory_bytes(); }
  uint64_t subgroup_elements() const override { return first().subgroup_elements(); }
  std::vector<std::string> describe_devices() const override { return first().describe_devices(); }

 private:
  Updater& first() const { return *ranks_.front(); }
  /// The first rank's is the caller's; the others have memory here, in the same places.
  WeightsSink sink_of(size_t rank, base::DataType type, const WeightsSink& sink) {
    if (!sink) return nullptr;
    const uint64_t bytes = base::data_type_bytes(type);
    memory_[rank].resize(space().count() * bytes);
    if (rank == 0) type_bytes_ = bytes;
    return [this, rank, bytes, &sink](uint64_t at) -> void* {
      void* place = nullptr;
      {
        const std::lock_guard lock(mutex_);
        place = sink(at);
        places_[at] = place;
      }
      return rank == 0 || place == nullptr ? place : memory_[rank].data() + at * bytes;
    };
  }
  void expect_same_weights(uint64_t at, uint64_t count) {
    for (uint64_t next = at; next < at + count;) {
      const plan::Subgroup subgroup = subgroup_at(next);
      const void* place = places_.contains(subgroup.first) ? places_[subgroup.first] : nullptr;
      for (size_t rank = 1; place != nullptr && rank < ranks_.size(); ++rank) {
        EXPECT_EQ(std::memcmp(memory_[rank].data() + subgroup.first * type_bytes_, place,
                              subgroup.count * type_bytes_),
                  0)
            << "rank " << rank << " from element " << subgroup.first;
      }
      next = subgroup.first + subgroup.count;
    }
  }

  const std::shared_ptr<Board> board_;
  std::vector<std::unique_ptr<Updater>> ranks_;
  std::vector<std::vector<std::byte>> memory_;  // weights of each rank but the first
  uint64_t type_bytes_ = 2;
  std::mutex mutex_;
  std::map<uint64_t, void*> places_;  // the caller's, of each subgroup that he was asked for
  std::map<uint64_t, std::vector<std::vector<std::byte>>> fetched_;
  std::map<uint64_t, void*> out_;
};

/// Opens with as many ranks as the board has. sources(rank): of all devices.
inline base::Result<std::unique_ptr<Crew>> open_crew(
    std::shared_ptr<Board> board, size_t ranks, const UpdaterOptions& options,
    const plan::ParameterSpace& space, const std::function<DeviceSources(size_t rank)>& sources) {
  std::vector<std::unique_ptr<Updater>> made(ranks);
  std::vector<base::Status> said(ranks);
  std::vector<DeviceSources> given;  // not made at once: hwloc's parts are of one thread
  for (size_t rank = 0; rank < ranks; ++rank) given.push_back(sources(rank));
  on_all_ranks(ranks, [&](size_t rank) {
    UpdaterOptions mine = options;
    mine.collectives = std::make_shared<BoardRank>(*board, static_cast<uint32_t>(rank));
    auto opened = Updater::open(mine, space, std::move(given[rank]));
    said[rank] = opened.status();
    if (opened.ok()) made[rank] = std::move(*opened);
  });
  for (size_t rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(said[rank].to_string(), said[0].to_string());
    if (!said[rank].ok()) return said[rank];
  }
  return std::make_unique<Crew>(std::move(board), std::move(made));
}

/// Devices are dealt to ranks in their order.
inline void deal_devices(UpdaterOptions& options, size_t ranks) {
  for (size_t d = 0; d < options.devices.size(); ++d) {
    options.devices[d].rank = static_cast<uint32_t>(
        ranks <= options.devices.size() ? d * ranks / options.devices.size() : d);
  }
}

class RanksPlace final : public StatePlace {
 public:
  RanksPlace(const Variant& variant, size_t ranks, bool stream_weights)
      : ranks_(ranks), in_memory_(variant.in_memory), options_(options_of(variant, scratch_)) {
    deal_devices(options_, ranks);
    options_.stream_weights = stream_weights;
    if (stream_weights) options_.memory_budget_bytes += variant.devices * base::kMiB;
  }
  base::Result<std::unique_ptr<Updater>> open() override {
    auto crew = open_crew();
    if (!crew.ok()) return std::move(crew).status();
    return std::unique_ptr<Updater>(std::move(*crew));
  }
  base::Result<std::unique_ptr<Crew>> open_crew() {
    while (in_memory_ && drives_.size() < options_.devices.size()) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(64 * base::kMiB));
      drives_.push_back(std::move(drive));
    }
    return engine::open_crew(std::make_shared<Board>(static_cast<uint32_t>(ranks_)), ranks_,
                             options_, contract_space(), [&](size_t) {
                               return in_memory_ ? emulated_sources(options_, drives_)
                                                 : local_sources(options_);
                             });
  }
  std::string path(const std::string& name) const { return scratch_ / name; }

 private:
  const Scratch scratch_;
  const size_t ranks_;
  const bool in_memory_;
  UpdaterOptions options_;
  std::vector<std::unique_ptr<csd::EmulatedDrive>> drives_;
};

/// Over fakes, one for each of two ranks and none for a third.
class FakeRanksPlace final : public StatePlace {
 public:
  explicit FakeRanksPlace(bool stream_weights = false, size_t ranks = 3, size_t devices = 2)
      : ranks_(ranks) {
    options_.stream_weights = stream_weights;
    options_.subgroup_elements = kBlock;
    options_.devices.resize(devices);
    for (size_t d = 0; d < devices; ++d) {
      options_.devices[d].path = "drive" + std::to_string(d);
      drives_.push_back(std::make_shared<FakeDrive>());
    }
    deal_devices(options_, ranks);
  }
  base::Result<std::unique_ptr<Updater>> open() override {
    auto crew = open_crew(std::make_shared<Board>(static_cast<uint32_t>(ranks_)));
    if (!crew.ok()) return std::move(crew).status();
    return std::unique_ptr<Updater>(std::move(*crew));
  }
  base::Result<std::unique_ptr<Crew>> open_crew(std::shared_ptr<Board> board) {
    return engine::open_crew(std::move(board), ranks_, options_, contract_space(),
                             [&](size_t) { return sources(); });
  }
  /// Opens the run in one process.
  base::Result<std::unique_ptr<Updater>> open_alone() {
    return Updater::open(options_, contract_space(), sources());
  }
  void set_ranks(size_t ranks) {
    ranks_ = ranks;
    deal_devices(options_, ranks);
  }
  DeviceSources sources() const {
    DeviceSources sources;
    for (size_t d = 0; d < drives_.size(); ++d) {
      sources.push_back(std::make_unique<FakeSource>(drives_[d], options_.devices[d].path));
    }
    return sources;
  }
  UpdaterOptions& options() { return options_; }
  FakeDrive& drive(size_t device) { return *drives_[device]; }

 private:
  size_t ranks_;
  UpdaterOptions options_;
  std::vector<std::shared_ptr<FakeDrive>> drives_;
};

/// A few of what one process has in more combinations.
inline std::vector<UpdaterKind> ranks_kinds(bool stream_weights = false) {
  struct Ranks {
    size_t ranks;
    Variant variant;
  };
  const Ranks all[] = {
      {2, {.name = "TwoRanks", .devices = 3}},
      {4,
       {.name = "FourRanksSpilledInSmallSubgroups",
        .devices = 3,
        .subgroup_elements = kBlock,
        .gradient_type = DataType::kF32,
        .gradient_budget_bytes = 0,
        .in_memory = true}},
      {2,
       {.name = "TwoRanksInPlaceHalfCached",
        .devices = 2,
        .durability = storage::Durability::kNone,
        .in_memory = true,
        .unequal = true,
        .state_cache_bytes = kHalfOfState}},
  };
  std::vector<UpdaterKind> kinds;
  for (const auto& [ranks, variant] : all) {
    UpdaterKind& kind = kinds.emplace_back();
    kind.name = variant.name;
    kind.make_place = [variant = variant, ranks = ranks, stream_weights] {
      return std::make_unique<RanksPlace>(variant, ranks, stream_weights);
    };
    kind.reference = [type = variant.gradient_type]() -> const Outcome& { return reference(type); };
    kind.in_place = variant.durability == storage::Durability::kNone;
  }
  UpdaterKind& fakes = kinds.emplace_back();
  fakes.name = "ThreeRanksOverFakes";
  fakes.make_place = [stream_weights] { return std::make_unique<FakeRanksPlace>(stream_weights); };
  fakes.reference = []() -> const Outcome& { return reference(DataType::kBf16); };
  constexpr std::string_view kLeftOut[] = {"TwoRanks", "FourRanksSpilledInSmallSubgroups"};
  base::leave_for_the_night(kinds, kLeftOut);
  return kinds;
}

}  // namespace smartinf::engine

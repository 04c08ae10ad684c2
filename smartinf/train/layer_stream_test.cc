// Weights that are copied to an accelerator late: what waits for copies, and what does not.
#include "smartinf/train/layer_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/train/model_source.h"

#include "tests/accelerator/accelerator.h"

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Status;
using test_accelerator::smartinf_test_accelerator_hold_copies;

/// Weights without devices: every element's is its own, and they are there at once.
class GivenWeights final : public engine::WeightSource {
 public:
  explicit GivenWeights(plan::ParameterSpace space) : space_(std::move(space)) {}

  static float weight(uint64_t element) { return static_cast<float>(element); }

  uint64_t waited_for = 0;  // by wait_weights(): the end of what was waited for last
  Status of_update;
  std::vector<uint64_t> fetched;  // the first element of each, in order

  const plan::ParameterSpace& space() const { return space_; }

  plan::Subgroup subgroup_at(uint64_t element) const override {
    constexpr uint64_t kElements = 1000;
    const uint64_t first = element / kElements * kElements;
    return {base::SubgroupId(static_cast<uint32_t>(element / kElements)), first,
            std::min(kElements, space_.count() - first)};
  }
  Status fetch_weights(uint64_t first, base::DataType /*type*/, void* out) override {
    const plan::Subgroup subgroup = subgroup_at(first);
    fetched.push_back(first);
    for (uint64_t i = 0; i < subgroup.count; ++i) static_cast<float*>(out)[i] = weight(first + i);
    return Status();
  }
  Status wait_fetched(uint64_t /*first*/) override { return Status(); }
  Status load_weights(base::DataType type, const engine::WeightsSink& sink) override {
    for (uint64_t first = 0; first < space_.count(); first += subgroup_at(first).count) {
      if (void* out = sink(first)) SI_RETURN_IF_ERROR(fetch_weights(first, type, out));
    }
    return Status();
  }
  Status wait_weights(uint64_t first, uint64_t count) override {
    waited_for = first + count;
    return of_update;
  }

 private:
  const plan::ParameterSpace space_;
};

class LateCopies : public testing::Test {
 protected:
  static constexpr uint32_t kUnits = 8;

  LateCopies() {
    ModelOptions options;
    options.layers = kUnits - 2;
    options.width = 32;
    options.heads = 2;
    options.mlp_width = 64;
    options.vocabulary = 64;
    options.tied_head = false;
    const model::Architecture architecture = architecture_of(options, /*sequence=*/16);
    const test_accelerator::Options plain;
    test_accelerator::smartinf_test_accelerator_set_options(&plain);
    updater_ = std::make_unique<GivenWeights>(model::make_parameter_space(architecture).value());
    model_ = std::make_unique<Model>(architecture, updater_->space(),
                                     torch::dtype(torch::kFloat32).device(accelerator_), 16);
  }

  void make_stream(const plan::UnitPlacement& placement, bool several_ranks = false) {
    stream_ = std::make_unique<LayerStream>(*updater_, *model_, copies_, base::DataType::kF32,
                                            placement, several_ranks);
    ASSERT_TRUE(stream_->load().ok());
  }

  /// All of a unit's weights, on their way to the host behind what the current stream waits for.
  torch::Tensor start_reading(const UnitWeights& weights, size_t unit) const {
    const auto count = static_cast<int64_t>(model_->units()[unit].count);
    const torch::Tensor all_N = torch::from_blob(weights.front().weight.data_ptr(), {count},
                                                 weights.front().weight.options());
    torch::Tensor read_N = torch::empty({count}, torch::dtype(torch::kFloat32).pinned_memory(true));
    read_N.copy_(all_N, /*non_blocking=*/true);
    return read_N;
  }

  const torch::Device accelerator_{torch::kPrivateUse1, 0};
  const CopyStreams copies_{accelerator_};
  std::unique_ptr<GivenWeights> updater_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<LayerStream> stream_;
};

TEST_F(LateCopies, ASlotOfTheHostIsUsedAgainWhenItsCopyIsDoneAndNobodyWaitsBefore) {
  make_stream({0, 0, 3, 2});
  std::vector<uint32_t> order;
  for (uint32_t unit = 0; unit < kUnits; ++unit) order.push_back(unit);
  stream_->start(order);

  smartinf_test_accelerator_hold_copies(true);
  std::atomic<bool> soon = false;
  std::atomic<bool> let_go = false;
  std::thread other([&] {
    using namespace std::chrono_literals;
    for (auto waited = 0ms; !soon && waited < 5000ms; waited += 1ms) {
      std::this_thread::sleep_for(1ms);
    }
    // Long enough for who does not wait to fill the slot with another unit.
    if (soon) std::this_thread::sleep_for(100ms);
    let_go = true;
    smartinf_test_accelerator_hold_copies(false);
  });
  std::vector<torch::Tensor> read;
  for (const uint32_t unit : order) {
    read.push_back(start_reading(stream_->get(unit), unit));
    if (unit == 1) {
      EXPECT_FALSE(let_go) << "a copy was waited for while a slot was free";
      soon = true;
    }
    stream_->release(unit);
  }
  other.join();
  const c10::impl::VirtualGuardImpl device(accelerator_.type());
  device.getStream(accelerator_).synchronize();
  for (const uint32_t unit : order) {
    const plan::Unit& span = model_->units()[unit];
    const auto* weights = read[unit].const_data_ptr<float>();
    const bool same = std::all_of(weights, weights + span.count, [&](const float& weight) {
      return weight == GivenWeights::weight(span.first + static_cast<uint64_t>(&weight - weights));
    });
    EXPECT_TRUE(same) << "unit " << unit;
  }
  stream_->close();
}

/// As above, where the accelerator computes with the slots themselves.
TEST_F(LateCopies, InPlaceASlotIsUsedAgainWhenItHasBeenComputedWith) {
  ::setenv("SMARTINF_UNIFIED_MEMORY", "yes", 1);
  const CopyStreams in_place(accelerator_);
  ::unsetenv("SMARTINF_UNIFIED_MEMORY");
  stream_ = std::make_unique<LayerStream>(*updater_, *model_, in_place, base::DataType::kF32,
                                          plan::UnitPlacement{0, 2, 3, 0});
  ASSERT_TRUE(stream_->load().ok());
  EXPECT_EQ(stream_->get(0).front().weight.data_ptr(), stream_->weights_at(0));
  stream_->release(0);
  std::vector<uint32_t> order;
  for (uint32_t unit = 2; unit < kUnits; ++unit) order.push_back(unit);
  stream_->start(order);
  smartinf_test_accelerator_hold_copies(true);
  std::thread other([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    smartinf_test_accelerator_hold_copies(false);
  });
  std::vector<torch::Tensor> read;
  for (const uint32_t unit : order) {
    read.push_back(start_reading(stream_->get(unit), unit));
    stream_->release(unit);
  }
  other.join();
  in_place.current().synchronize();
  for (size_t i = 0; i < order.size(); ++i) {
    const plan::Unit& span = model_->units()[order[i]];
    for (const uint64_t element : {uint64_t{0}, span.count - 1}) {
      EXPECT_EQ(read[i].const_data_ptr<float>()[element],
                GivenWeights::weight(span.first + element))
          << order[i];
    }
  }
  stream_->close();
}

TEST_F(LateCopies, SeveralRanksAskForWeightsInOneOrderHoweverLateTheirCopiesAre) {
  std::vector<uint32_t> order;
  for (uint32_t unit = 0; unit < kUnits; ++unit) order.push_back(unit);
  order.insert(order.end(), order.rbegin(), order.rend());
  for (const plan::UnitPlacement& placement :
       {plan::UnitPlacement{0, 0, 3, 2}, plan::UnitPlacement{1, 3, 4, 3}}) {
    std::vector<std::vector<uint64_t>> fetched;
    for (const bool late : {false, true}) {
      const test_accelerator::Options options{.delay_us = late ? 5000u : 0u};
      test_accelerator::smartinf_test_accelerator_set_options(&options);
      make_stream(placement, /*several_ranks=*/true);
      updater_->fetched.clear();
      stream_->start(order);
      for (const uint32_t unit : order) {
        stream_->get(unit);
        updater_->fetched.push_back(~uint64_t{unit});  // where it is, among the fetches
        // All copies have ended before the next call, or the last one has not.
        if (!late) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        stream_->release(unit);
      }
      fetched.push_back(updater_->fetched);
      stream_->close();
    }
    EXPECT_EQ(fetched[0], fetched[1]);
  }
}

TEST_F(LateCopies, NewWeightsOfTheNextUnitComeWhileOneComputesAndOverwriteNothingThatIsUsed) {
  make_stream({kUnits, kUnits, 0, 0});
  copies_.up().synchronize();
  smartinf_test_accelerator_hold_copies(true);
  const torch::Tensor old_N = start_reading(stream_->get(0), 0);
  stream_->release(0);
  stream_->updated();
  auto* in_host = static_cast<float*>(stream_->weights_at(0));
  std::fill_n(in_host, model_->units()[0].count, -1.0f);
  updater_->waited_for = 0;
  const torch::Tensor new_N = start_reading(stream_->get(0), 0);
  EXPECT_EQ(updater_->waited_for, model_->units()[0].end());
  stream_->release(0);
  EXPECT_EQ(updater_->waited_for, model_->units()[1].end());
  smartinf_test_accelerator_hold_copies(false);
  copies_.current().synchronize();
  EXPECT_EQ(old_N.const_data_ptr<float>()[1], GivenWeights::weight(1));
  EXPECT_EQ(new_N.const_data_ptr<float>()[1], -1.0f);
  EXPECT_EQ(test_accelerator::smartinf_test_accelerator_order_errors(), 0u);
  stream_->close();
}

TEST_F(LateCopies, TwoUnitsAreBroughtAheadFromTheHostsMemoryIfThereAreThreeSlots) {
  for (const uint32_t slots : {2, 3}) {
    make_stream({0, kUnits, 0, slots});
    stream_->start({0, 1, 2, 3, 4});
    stream_->get(0);
    stream_->get(1);
    stream_->release(0);
    copies_.up().synchronize();
    std::fill_n(static_cast<float*>(stream_->weights_at(0)), updater_->space().count(), -1.0f);
    stream_->release(1);
    for (const size_t unit : {2, 3}) {
      const torch::Tensor read_N = start_reading(stream_->get(unit), unit);
      copies_.current().synchronize();
      EXPECT_EQ(read_N.const_data_ptr<float>()[0] != -1.0f, unit < slots + 1) << unit;
      stream_->release(unit);
    }
    stream_->close();
  }
}

TEST_F(LateCopies, WaitAllWaitsForTheUpdateAndGivesItsError) {
  make_stream({kUnits, kUnits, 0, 0});
  stream_->updated();
  updater_->waited_for = 0;
  EXPECT_TRUE(stream_->wait_all().ok());
  EXPECT_EQ(updater_->waited_for, updater_->space().count());
  stream_->updated();
  updater_->of_update = Status(ErrorCode::kIo, "a drive is gone");
  EXPECT_EQ(stream_->wait_all().code(), ErrorCode::kIo);
  stream_->close();
}

}  // namespace
}  // namespace smartinf::train

// Tests of what reaches a device of a compressed gradient.
#include "smartinf/engine/compressed_sender.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/engine/test_model.h"

namespace smartinf::engine {
namespace {

/// Keeps the messages that reach it, until one of `bad` comes.
class PartRecorder final : public csd::Device {
 public:
  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  storage::StoreState state() const override { return {}; }
  std::string client_metadata() const override { return {}; }
  base::Status recover_to(base::StepNumber) override { return base::Status(); }
  void submit(csd::Command& command) override {
    const std::lock_guard lock(mutex_);
    const auto& put = std::get<csd::PutCompressedGradient>(command.message);
    messages[put.subgroup.value].assign(put.message.begin(), put.message.end());
    csd::Completion done;
    done.command = &command;
    if (put.subgroup.value == bad) {
      done.status = base::Status(base::ErrorCode::kCorrupt, "asked to fail", "It is a test.");
    }
    command.replies->push(std::move(done));
  }
  base::TrafficReading host_traffic() const override { return {}; }
  base::TrafficReading store_traffic() const override { return {}; }
  uint64_t bytes_written_ever() const override { return 0; }

  std::map<uint32_t, std::vector<std::byte>> messages;
  uint32_t bad = ~0u;

 private:
  std::mutex mutex_;
  csd::DeviceInfo info_;
  storage::StoreLayout layout_;
};

TEST(Compression, ThreadsChangeNothing) {
  constexpr uint32_t kSubgroups = 23;
  constexpr uint64_t kElements = (kSubgroups - 1) * kBlock + 1234;
  std::vector<plan::Subgroup> subgroups;
  for (uint32_t i = 0; i < kSubgroups; ++i) {
    const uint64_t first = i * kBlock;
    subgroups.push_back({base::SubgroupId{i}, first, std::min(kBlock, kElements - first)});
  }
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    std::optional<compress::CompressionSummary> first_summary;
    std::map<uint32_t, std::vector<std::byte>> first_messages;
    for (const uint32_t threads : {1u, 2u, 7u}) {
      PartRecorder recorder;
      compress::CompressOptions options;
      options.values = values;
      options.density = 0.08;
      auto made =
          compress::GradientCompressor::make(options, kElements, 1, flat_matrices(kElements));
      ASSERT_TRUE(made.ok());
      base::ThreadTeam team(threads, "test");
      DeviceWatch watch{std::chrono::minutes(1)};
      CompressedSender sender(**made, team, watch);
      std::vector<CompressedSender::Piece> pieces;
      for (const plan::Subgroup& subgroup : subgroups) pieces.push_back({&subgroup, &recorder, {}});
      for (int step = 1; step <= 3; ++step) {
        const auto gradient = contract_gradient(kElements, step);
        (*made)->begin_step();
        (*made)->put(0, gradient.data(), DataType::kBf16, kElements);
        (*made)->begin_update(static_cast<uint64_t>(step), 1, 1, {}, team);
        ASSERT_TRUE(sender.send(pieces).status.ok());
        if (step < 3) (*made)->commit();
      }
      const compress::CompressionSummary summary = (*made)->summary();
      if (!first_summary) {
        first_summary = summary;
        first_messages = recorder.messages;
      }
      EXPECT_TRUE(recorder.messages == first_messages) << threads << " threads";
      EXPECT_EQ(summary.residual_norm, first_summary->residual_norm);
      EXPECT_EQ(summary.values, first_summary->values);
      EXPECT_EQ(summary.bytes, first_summary->bytes);
      recorder.bad = 11;
      const auto failure = sender.send(pieces);
      EXPECT_EQ(failure.status.code(), base::ErrorCode::kCorrupt);
      EXPECT_EQ(failure.device, &recorder);
      EXPECT_EQ(failure.subgroup.value, 11u);
    }
    EXPECT_EQ(first_messages.size(), kSubgroups);
  }
}

TEST(Compression, AGroupThatIsSkippedKeepsItsResidual) {
  const auto message_of = [](compress::GradientCompressor& compressor,
                             compress::CompressedWriter& writer,
                             std::span<const plan::GroupSpan> out) {
    compress::GradientCompressor::Scratch scratch;
    const auto message = compressor.compress(scratch, writer, {base::SubgroupId{0}, 0, 1000}, out);
    std::vector<base::Bf16> values(1000);
    compress::CompressedView::parse(message)->expand_block(
        0, reinterpret_cast<std::byte*>(values.data()));
    return values;
  };
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    compress::CompressOptions options;
    options.values = values;
    options.density = 0.08;
    auto made = compress::GradientCompressor::make(options, 1000, 1, {});
    ASSERT_TRUE(made.ok());
    compress::GradientCompressor& compressor = **made;
    compress::CompressedWriter writer;
    const std::vector<float> ones(1000, 1.0f);
    const auto step = [&](uint64_t number, std::span<const plan::GroupSpan> out) {
      compressor.begin_step();
      compressor.put(0, ones.data(), DataType::kF32, 1000);
      base::ThreadTeam alone(1, "test");
      compressor.begin_update(number, 1, 1, {}, alone);
      auto sent = message_of(compressor, writer, out);
      compressor.commit();
      return sent;
    };
    step(1, {});
    const std::vector<plan::GroupSpan> out = {{0, 500, 0}};
    const auto second = step(2, out);
    for (size_t i = 0; i < 500; ++i) ASSERT_EQ(second[i].bits, 0) << i;
    const auto third = step(3, {});
    // 80 went in the first step, from the front: their place has 1 or 2, others of the
    // front 2 kept and new, the rest of the second half 3.
    for (size_t i = 0; i < 1000; ++i) {
      ASSERT_TRUE(third[i].bits == 0 || base::to_f32(third[i]) == 3.0f) << i;
    }
  }
}

/// Nothing gets lost: what was sent and what is kept sum to what came in.
TEST(Compression, SentAndKeptSumToTheGradients) {
  constexpr uint64_t kElements = kBlock + 777;
  for (const compress::ValueEncoding values :
       {compress::ValueEncoding::kBf16, compress::ValueEncoding::kSign}) {
    compress::CompressOptions options;
    options.values = values;
    options.density = values == compress::ValueEncoding::kSign ? 0.4 : 0.05;
    auto made = compress::GradientCompressor::make(options, kElements, 1, flat_matrices(kElements));
    ASSERT_TRUE(made.ok());
    compress::GradientCompressor::Scratch scratch;
    compress::CompressedWriter writer;
    std::vector<double> owed(kElements);
    std::vector<base::Bf16> arrived(kElements);
    for (int step = 1; step <= 30; ++step) {
      const auto gradient = contract_gradient(kElements, step);
      const double scale = step % 3 == 0 ? 0.5 : 1;  // a clipped step
      (*made)->begin_step();
      (*made)->put(0, gradient.data(), DataType::kBf16, kElements);
      base::ThreadTeam alone(1, "test");
      (*made)->begin_update(static_cast<uint64_t>(step), scale, 1, {}, alone);
      const auto message =
          (*made)->compress(scratch, writer, {base::SubgroupId{0}, 0, kElements}, {});
      const auto view = compress::CompressedView::parse(message);
      ASSERT_TRUE(view.ok());
      for (uint64_t b = 0; b < view->blocks(); ++b) {
        view->expand_block(b, reinterpret_cast<std::byte*>(arrived.data() + b * kBlock));
      }
      for (uint64_t i = 0; i < kElements; ++i) {
        owed[i] += scale * base::to_f32(gradient[i]) - base::to_f32(arrived[i]);
      }
      if (step < 30) (*made)->commit();
    }
    const base::Bf16* residual = (*made)->next_residual(0);
    double squares = 0;
    double error = 0;
    double bias = 0;
    for (uint64_t i = 0; i < kElements; ++i) {
      const double difference = owed[i] - base::to_f32(residual[i]);
      squares += owed[i] * owed[i];
      error += difference * difference;
      bias += difference;
    }
    EXPECT_NEAR(std::sqrt(squares), (*made)->summary().residual_norm, 0.01 * std::sqrt(squares));
    // 30 roundings to 8 bits, each stochastic: seen 0.9 %.
    EXPECT_LT(std::sqrt(error), 0.02 * std::sqrt(squares));
    // Rounding to nearest would be as small, but the errors must not add up to one side.
    EXPECT_LT(std::abs(bias), 4 * std::sqrt(error));
  }
}

}  // namespace
}  // namespace smartinf::engine

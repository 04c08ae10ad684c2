#include "apps/smartinf/update_rate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/density.h"
#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/compress/message.h"
#include "smartinf/engine/gradient_path.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/kernels/update.h"

#include "apps/smartinf/median.h"
#include "apps/smartinf/synthetic_steps.h"

namespace smartinf::apps {
namespace {

using base::DataType;

constexpr uint64_t kBlock = base::kBlockElements;
constexpr uint64_t kBlocks = 64;                    // of each thread: beyond the caches
constexpr uint64_t kGradientBytesMax = 4 * kBlock;  // of a block, when expanded

/// The median of some passes; `prepare`, before each, is not timed.
template <typename Pass, typename Prepare>
double median_seconds(Pass pass, Prepare prepare) {
  std::vector<double> seconds(5);
  for (double& pass_s : seconds) {
    prepare();
    const uint64_t start_ns = base::now_ns();
    pass();
    pass_s = base::seconds_since(start_ns);
  }
  return median(std::move(seconds));
}
template <typename Pass>
double median_seconds(Pass pass) {
  return median_seconds(pass, [] {});
}

/// As many elements of each block as are sent, anywhere in it, half of them negative.
std::vector<std::byte> sparse_message(const compress::CompressOptions& compress) {
  const size_t sent = compress::values_per_block(compress.density, kBlock);
  std::vector<uint32_t> indices;
  std::vector<float> values;
  uint64_t random = 1;
  for (uint32_t i = 0; i < kBlock; ++i) {
    random = base::mix_seed(random, i);
    if (random % (kBlock - i) >= sent - indices.size()) continue;
    indices.push_back(i);
    values.push_back(random >> 63 == 0 ? 1e-3f : -1e-3f);
  }
  compress::CompressedWriter writer;
  // A matrix whose columns are decoded for every block.
  constexpr uint64_t kRows = kBlocks * kBlock / kMatrixColumns;
  writer.begin(base::SubgroupId{0}, kBlocks * kBlock, compress.values,
               {.values = std::vector<float>(kRows + kMatrixColumns, 1.0f),
                .runs = {kRows, kMatrixColumns}});
  for (uint64_t b = 0; b < kBlocks; ++b) writer.add_block(indices, values);
  const auto message = writer.finish();
  return {message.begin(), message.end()};
}

/// One thread's state; its work is that of csd::UpdateJob, without a store behind it.
class ProcessorPass {
 public:
  ProcessorPass(const ProcessorWork& work, std::byte* memory, uint64_t block_bytes,
                std::span<const std::byte> message)
      : work_(work), memory_(memory), block_bytes_(block_bytes), message_(message) {}

  void run(const kernels::StepScalars& scalars) {
    using base::PlaneKind;
    const auto planes = kernels::rule_planes(kernels::UpdateRule::kAdamW);
    std::vector<float> columns(kMatrixColumns);
    std::vector<kernels::SecondMomentRow> second_moment(kBlock / kMatrixColumns);
    for (uint64_t b = 0; b < kBlocks; ++b) {
      std::byte* at = memory_ + b * block_bytes_;
      kernels::UpdateBlock block;
      block.count = kBlock;
      std::array<std::span<std::byte>, 3> bytes;
      for (size_t i = 0; i < planes.size(); ++i) {
        block.planes[i] = at;
        bytes[i] = {at, base::encoded_bytes(base::plane_encoding(work_.format, planes[i]), kBlock)};
        if (work_.checksums) seen_ ^= base::checksum(bytes[i], b);
        at += base::round_up(bytes[i].size(), uint64_t{64});
      }
      block.gradient = at;
      if (work_.compress.on()) {
        const auto view = compress::CompressedView::trusted(message_);
        view.expand_block(b, at);
        view.read_factors(1, view.factors() - columns.size(), columns);
        std::fill(second_moment.begin(), second_moment.end(),
                  kernels::SecondMomentRow{kMatrixColumns, 1e-6f, columns.data()});
        block.second_moment = second_moment;
        block.gradient_type = compress::expanded_type(work_.compress.values);
      }
      block.weights_out = at + kGradientBytesMax;
      const kernels::ScalarsSpan run{kBlock, &scalars};
      kernels::kernels().update_block(work_.format, block, {&run, 1});
      for (size_t i = 0; work_.checksums && i < planes.size(); ++i) {
        seen_ ^= base::checksum(bytes[i], b);
      }
    }
  }
  /// Digest of all that was seen, so that it is computed.
  uint64_t seen() const { return seen_; }

 private:
  const ProcessorWork work_;
  std::byte* memory_;
  uint64_t block_bytes_;
  std::span<const std::byte> message_;
  uint64_t seen_ = 0;
};

}  // namespace

base::Result<double> measure_update_rate(const ProcessorWork& work, uint32_t threads) {
  uint64_t block_bytes = kGradientBytesMax + 2 * kBlock;  // and weights out
  for (const base::PlaneKind kind : kernels::rule_planes(kernels::UpdateRule::kAdamW)) {
    block_bytes += base::round_up(
        base::encoded_bytes(base::plane_encoding(work.format, kind), kBlock), uint64_t{64});
  }
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer memory,
                      base::AlignedBuffer::allocate(threads * kBlocks * block_bytes));
  std::memset(memory.data(), 0, memory.size());
  const std::vector<std::byte> message =
      work.compress.on() ? sparse_message(work.compress) : std::vector<std::byte>();
  std::vector<ProcessorPass> passes;
  for (uint32_t t = 0; t < threads; ++t) {
    passes.emplace_back(work, memory.data() + t * kBlocks * block_bytes, block_bytes, message);
  }
  kernels::RuleOptions rule;
  rule.rule = kernels::UpdateRule::kAdamW;
  const kernels::StepScalars scalars =
      kernels::make_step_scalars(rule, kernels::GroupOptions{}, 1, 1.0, 0);
  base::ThreadTeam team(threads, "si-measure");
  const double pass_s = median_seconds(
      [&] { team.run(passes.size(), [&](uint32_t, size_t t) { passes[t].run(scalars); }); });
  return static_cast<double>(threads * kBlocks * kBlock) / pass_s;
}

base::Result<double> measure_gradient_rate(DataType type, uint32_t threads) {
  constexpr uint64_t kPiece = engine::kGradientPieceElements;
  const uint64_t piece_bytes = kPiece * base::data_type_bytes(type);
  const uint64_t pieces = threads * kBlocks * kBlock / kPiece;
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer from,
                      base::AlignedBuffer::allocate(pieces * piece_bytes));
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer to,
                      base::AlignedBuffer::allocate(pieces * piece_bytes));
  std::memset(from.data(), 0, from.size());
  std::memset(to.data(), 0, to.size());
  std::vector<double> norms(pieces);
  base::ThreadTeam team(threads, "si-measure");
  const double pass_s = median_seconds([&] {
    team.run(pieces, [&](uint32_t, size_t i) {
      const std::byte* piece = from.data() + i * piece_bytes;
      norms[i] = kernels::kernels().partial_norm(piece, type, kPiece).sum_of_squares;
      std::memcpy(to.data() + i * piece_bytes, piece, piece_bytes);
    });
  });
  return static_cast<double>(pieces * kPiece) / pass_s;
}

base::Result<double> measure_copy_rate(uint32_t threads) {
  constexpr uint64_t kBytes = uint64_t{64} << 20;  // of each thread
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer from,
                      base::AlignedBuffer::allocate(threads * kBytes));
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer to,
                      base::AlignedBuffer::allocate(threads * kBytes));
  std::memset(from.data(), 0, from.size());
  std::memset(to.data(), 0, to.size());
  base::ThreadTeam team(threads, "si-measure");
  const double pass_s = median_seconds([&] {
    team.run(threads, [&](uint32_t, size_t t) {
      std::memcpy(to.data() + t * kBytes, from.data() + t * kBytes, kBytes);
    });
  });
  return static_cast<double>(threads * kBytes) / pass_s;
}

base::Result<SelectRate> measure_select_rate(const compress::CompressOptions& compress) {
  SelectRate rate;
  rate.threads = engine::gradient_threads();
  constexpr uint64_t kElements = kBlocks * kBlock;  // of each thread
  const uint64_t elements = rate.threads * kElements;
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, synthetic_space(elements));
  SI_ASSIGN_OR_RETURN(
      const auto compressor,
      compress::GradientCompressor::make(compress, elements, 0, compress::matrix_layouts(space)));
  // The same values as the steps that are timed, whose spread decides how long selecting takes.
  SI_ASSIGN_OR_RETURN(const auto steps,
                      SyntheticSteps::make(kElements, DataType::kBf16, DataType::kBf16));
  std::vector<compress::GradientCompressor::Scratch> scratches(rate.threads);
  std::vector<compress::CompressedWriter> writers(rate.threads);
  base::ThreadTeam team(rate.threads, "si-measure");
  uint64_t step = 0;
  const auto pass = [&] {
    compressor->begin_update(step, 1, 1, {}, team);
    team.run(rate.threads, [&](uint32_t worker, size_t t) {
      const plan::Subgroup own{base::SubgroupId{static_cast<uint32_t>(t)}, t * kElements,
                               kElements};
      const auto message = compressor->compress(scratches[worker], writers[worker], own, {});
      // As the device does, on these cores.
      SI_CHECK(compress::CompressedView::parse(message).ok(), "a message of our own");
    });
  };
  const auto prepare = [&] {
    if (step++ > 0) compressor->commit();
    compressor->begin_step();
    for (uint64_t first = 0; first < elements; first += engine::kGradientCutElements) {
      compressor->put(first, steps->gradient(), DataType::kBf16, engine::kGradientCutElements);
    }
  };
  rate.params_per_s = static_cast<double>(kElements) / median_seconds(pass, prepare);
  return rate;
}

base::Result<double> measure_step_ahead_rate() {
  constexpr uint64_t kElements = kBlocks * kBlock;
  constexpr uint64_t kBytes = kElements * sizeof(base::Bf16);
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer weights, base::AlignedBuffer::allocate(kBytes));
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer residual_memory,
                      base::AlignedBuffer::allocate(kBytes));
  std::memset(weights.data(), 0, kBytes);
  std::memset(residual_memory.data(), 0, kBytes);
  const std::span residual(reinterpret_cast<const base::Bf16*>(residual_memory.data()), kElements);
  const double pass_s = median_seconds([&] { step_rows_ahead(residual, weights.data()); });
  return static_cast<double>(kElements) / pass_s;
}

StateBytes state_bytes_per_parameter(kernels::UpdateRule rule, base::StateFormat format) {
  StateBytes bytes;
  for (const base::PlaneKind kind : kernels::rule_planes(rule)) {
    const base::Encoding encoding = base::plane_encoding(format, kind);
    (kind == base::PlaneKind::kMaster ? bytes.master : bytes.moments) +=
        static_cast<double>(base::encoded_bytes(encoding, base::kBlockElements)) /
        static_cast<double>(base::kBlockElements);
  }
  return bytes;
}

}  // namespace smartinf::apps

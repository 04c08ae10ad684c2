// smartinf bench kernels: each kernel beside a triad of as many bytes (kernel_timer.h).
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/selection.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/kernels/update.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/kernel_timer.h"
#include "apps/smartinf/synthetic_steps.h"
#include "apps/smartinf/values_flag.h"

namespace smartinf::apps {
namespace {

using base::DataType;
using base::PlaneKind;
using base::StateFormat;
using kernels::UpdateRule;

struct BenchOptions {
  double params = 2e7;
  int repeat = 5;
  std::vector<uint32_t> threads;     // empty: one, and all
  std::vector<std::string> kernels;  // empty: all
  std::vector<std::string> rules;
  std::vector<std::string> formats;
  std::vector<std::string> gradients;
  std::string weights = "bf16";
  std::vector<double> shares = {0.01};            // of the elements, that Top-K selects
  std::optional<compress::ValueEncoding> values;  // of compressed gradients
  bool json = false;
};

class KernelBench {
 public:
  explicit KernelBench(BenchOptions options)
      : options_(std::move(options)),
        elements_(static_cast<uint64_t>(options_.params)),
        timer_(elements_, options_.repeat, options_.json) {}

  base::Status run() {
    SI_RETURN_IF_ERROR(allocate());
    std::vector<uint32_t> sizes = options_.threads;
    if (sizes.empty()) {
      sizes = {1};
      if (const uint32_t all = std::thread::hardware_concurrency(); all > 1) sizes.push_back(all);
    }
    timer_.begin();
    for (const uint32_t size : sizes) {
      base::ThreadTeam team(size, "si-bench");
      if (wanted(options_.kernels, "update")) bench_updates(team, false);
      if (wanted(options_.kernels, "sealed-update")) bench_updates(team, true);
      if (wanted(options_.kernels, "norm")) bench_norms(team);
      if (wanted(options_.kernels, "cast")) bench_casts(team);
      if (wanted(options_.kernels, "checksum")) bench_checksum(team);
      if (wanted(options_.kernels, "topk")) bench_selection(team);
      if (wanted(options_.kernels, "matrix-squares")) bench_matrix_squares(team);
      if (wanted(options_.kernels, "step-ahead")) bench_step_ahead(team);
      if (wanted(options_.kernels, "compress")) SI_RETURN_IF_ERROR(bench_compression(team));
    }
    timer_.end();
    return {};
  }

 private:
  static bool wanted(const std::vector<std::string>& chosen, std::string_view name) {
    return chosen.empty() || std::find(chosen.begin(), chosen.end(), name) != chosen.end();
  }

  base::Status allocate() {
    // Planes of the widest format.
    for (base::AlignedBuffer& plane : planes_) {
      SI_ASSIGN_OR_RETURN(plane, base::AlignedBuffer::allocate(elements_ * 4 + base::kIoAlignment));
    }
    SI_ASSIGN_OR_RETURN(gradient_, base::AlignedBuffer::allocate(elements_ * 4));
    SI_ASSIGN_OR_RETURN(weights_, base::AlignedBuffer::allocate(elements_ * 4));
    // The widest kernel moves 32 bytes an element.
    return timer_.allocate(elements_ * 32);
  }

  /// A gradient that looks like one: signs and magnitudes vary, all finite.
  void fill_gradient(DataType type) {
    std::vector<float> chunk(1 << 16);
    uint64_t state = 1;
    const uint64_t width = base::data_type_bytes(type);
    for (uint64_t first = 0; first < elements_; first += chunk.size()) {
      const size_t count = std::min<uint64_t>(chunk.size(), elements_ - first);
      for (float& value : chunk) {
        state = base::mix_seed(state, 0);
        // Four uniform numbers added up: near enough to a normal distribution.
        const uint64_t sum =
            (state & 0xffff) + (state >> 16 & 0xffff) + (state >> 32 & 0xffff) + (state >> 48);
        value = (static_cast<float>(sum) - 0x1p17f) * 0x1p-24f;
      }
      kernels::kernels().cast_from_f32(chunk.data(), gradient_.data() + first * width, type, count);
    }
  }

  void fill_state(UpdateRule rule, StateFormat format) {
    std::vector<float> chunk(base::kBlockElements);
    const std::span<const PlaneKind> kinds = kernels::rule_planes(rule);
    for (size_t i = 0; i < kinds.size(); ++i) {
      for (size_t e = 0; e < chunk.size(); ++e) {
        chunk[e] = 1e-3f * static_cast<float>(1 + (e * 7919) % 1024);
      }
      const base::Encoding encoding = base::plane_encoding(format, kinds[i]);
      const uint64_t block_bytes = base::encoded_bytes(encoding, base::kBlockElements);
      for (uint64_t first = 0; first < elements_; first += base::kBlockElements) {
        const size_t count = std::min<uint64_t>(base::kBlockElements, elements_ - first);
        kernels::kernels().encode_block(
            encoding, kinds[i], chunk.data(),
            planes_[i].data() + first / base::kBlockElements * block_bytes, count, first, 1, 1);
      }
    }
  }

  /// `sealed`: with the checksum of each plane's block before and after, as a device does it.
  void bench_updates(base::ThreadTeam& team, bool sealed) {
    for (const UpdateRule rule : kernels::all_update_rules()) {
      const std::string rule_name(kernels::update_rule_name(rule));
      if (!wanted(options_.rules, rule_name)) continue;
      for (const StateFormat format : base::all_state_formats()) {
        const std::string format_name = base::state_format_name(format);
        if (!wanted(options_.formats, format_name)) continue;
        for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
          const std::string gradient_name(base::data_type_name(type));
          if (!wanted(options_.gradients, gradient_name)) continue;
          bench_update(team, rule, format, type, sealed);
        }
      }
    }
  }

  void bench_update(base::ThreadTeam& team, UpdateRule rule, StateFormat format, DataType type,
                    bool sealed) {
    fill_gradient(type);
    fill_state(rule, format);
    const std::span<const PlaneKind> kinds = kernels::rule_planes(rule);
    std::array<uint64_t, 3> block_bytes{};
    const bool has_weights = options_.weights != "none";
    const DataType weights_type = options_.weights == "f32" ? DataType::kF32 : DataType::kBf16;
    const uint64_t weights_width = has_weights ? base::data_type_bytes(weights_type) : 0;
    uint64_t bytes = elements_ * (base::data_type_bytes(type) + weights_width);
    for (size_t i = 0; i < kinds.size(); ++i) {
      const base::Encoding encoding = base::plane_encoding(format, kinds[i]);
      block_bytes[i] = base::encoded_bytes(encoding, base::kBlockElements);
      bytes += 2 * base::encoded_bytes(encoding, elements_);
    }
    const kernels::StepScalars scalars = kernels::make_step_scalars(
        {.rule = rule}, {.lr = 1e-4, .weight_decay = 0.1}, /*step=*/10, /*gradient_scale=*/1, 1);
    const uint64_t blocks = base::divide_up(elements_, base::kBlockElements);
    std::atomic<uint64_t> checksums{0};
    const std::function<void(uint32_t)> work = [&](uint32_t index) {
      const Share share = share_of(blocks, index, team.size());
      uint64_t sum = 0;
      for (uint64_t b = share.first; b < share.last; ++b) {
        const uint64_t first = b * base::kBlockElements;
        kernels::UpdateBlock block{
            .count = std::min(base::kBlockElements, elements_ - first),
            .element = first,
            .gradient = gradient_.data() + first * base::data_type_bytes(type),
            .gradient_type = type,
            .weights_out = has_weights ? weights_.data() + first * weights_width : nullptr,
            .weights_type = weights_type};
        const auto checksum_planes = [&] {
          for (size_t i = 0; i < kinds.size(); ++i) {
            sum += base::checksum(
                {block.planes[i],
                 base::encoded_bytes(base::plane_encoding(format, kinds[i]), block.count)},
                b);
          }
        };
        for (size_t i = 0; i < kinds.size(); ++i) {
          block.planes[i] = planes_[i].data() + b * block_bytes[i];
        }
        if (sealed) checksum_planes();
        const kernels::ScalarsSpan run{block.count, &scalars};
        kernels::kernels().update_block(format, block, {&run, 1});
        if (sealed) checksum_planes();
      }
      checksums += sum;
    };
    timer_.time(team,
                {.kernel = sealed ? "sealed-update" : "update",
                 .rule = std::string(kernels::update_rule_name(rule)),
                 .format = base::state_format_name(format),
                 .gradient = std::string(base::data_type_name(type)),
                 .bytes = bytes},
                work);
  }

  void bench_norms(base::ThreadTeam& team) {
    for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
      const std::string name(base::data_type_name(type));
      if (!wanted(options_.gradients, name)) continue;
      fill_gradient(type);
      const uint64_t width = base::data_type_bytes(type);
      std::atomic<bool> finite{true};
      timer_.time(team, {.kernel = "norm", .gradient = name, .bytes = elements_ * width},
                  [&](uint32_t index) {
                    const Share share = share_of(elements_, index, team.size());
                    const kernels::KernelTable::Norm norm = kernels::kernels().partial_norm(
                        gradient_.data() + share.first * width, type, share.last - share.first);
                    if (!norm.finite) finite = false;
                  });
    }
  }

  void bench_casts(base::ThreadTeam& team) {
    for (const DataType type : {DataType::kBf16, DataType::kF16}) {
      const std::string name(base::data_type_name(type));
      if (!wanted(options_.gradients, name)) continue;
      auto* master = reinterpret_cast<float*>(planes_[0].data());
      timer_.time(team, {.kernel = "from_f32", .gradient = name, .bytes = elements_ * 6},
                  [&](uint32_t index) {
                    const Share share = share_of(elements_, index, team.size());
                    kernels::kernels().cast_from_f32(master + share.first,
                                                     weights_.data() + share.first * 2, type,
                                                     share.last - share.first);
                  });
      fill_gradient(type);
      timer_.time(team, {.kernel = "to_f32", .gradient = name, .bytes = elements_ * 6},
                  [&](uint32_t index) {
                    const Share share = share_of(elements_, index, team.size());
                    kernels::kernels().cast_to_f32(gradient_.data() + share.first * 2, type,
                                                   master + share.first, share.last - share.first);
                  });
    }
  }

  /// Times the squares of a step's gradient by row and by column, as they are computed before it is
  /// compressed.
  void bench_matrix_squares(base::ThreadTeam& team) {
    fill_gradient(DataType::kBf16);
    const auto* gradient = reinterpret_cast<const base::Bf16*>(gradient_.data());
    const uint64_t rows = elements_ / kMatrixColumns;
    std::vector<std::vector<float>> row_sums(team.size(), std::vector<float>(rows));
    std::vector<std::vector<float>> column_sums(team.size(), std::vector<float>(kMatrixColumns));
    timer_.time(team, {.kernel = "matrix-squares", .gradient = "bf16", .bytes = elements_ * 2},
                [&](uint32_t index) {
                  const Share share = share_of(rows, index, team.size());
                  const uint64_t count = share.last - share.first;
                  kernels::add_matrix_squares(
                      kernels::kernels(),
                      {gradient + share.first * kMatrixColumns, count * kMatrixColumns}, 1,
                      std::span(row_sums[index]).first(count), column_sums[index]);
                });
  }

  /// Times what compression adds to weights on their way up: bf16 of both, roots of the variance by
  /// row and column.
  void bench_step_ahead(base::ThreadTeam& team) {
    fill_gradient(DataType::kBf16);
    const auto* residual = reinterpret_cast<const base::Bf16*>(gradient_.data());
    timer_.time(team, {.kernel = "step-ahead", .gradient = "bf16", .bytes = elements_ * 6},
                [&](uint32_t index) {
                  const Share rows = share_of(base::divide_up(elements_, uint64_t{kMatrixColumns}),
                                              index, team.size());
                  const uint64_t first = std::min(rows.first * kMatrixColumns, elements_);
                  const uint64_t last = std::min(rows.last * kMatrixColumns, elements_);
                  step_rows_ahead({residual + first, last - first},
                                  weights_.data() + first * sizeof(base::Bf16));
                });
  }

  void bench_checksum(base::ThreadTeam& team) {
    std::atomic<uint64_t> checksums{0};
    timer_.time(team, {.kernel = "checksum", .bytes = elements_ * 4}, [&](uint32_t index) {
      const uint64_t block_bytes = base::kBlockElements * 4;
      const Share share = share_of(elements_ * 4 / block_bytes, index, team.size());
      uint64_t sum = 0;
      for (uint64_t b = share.first; b < share.last; ++b) {
        sum += base::checksum({planes_[0].data() + b * block_bytes, block_bytes}, b);
      }
      checksums += sum;
    });
  }

  /// Each thread selects from its share of the elements and adds into an array of its own.
  void bench_selection(base::ThreadTeam& team) {
    fill_gradient(DataType::kF32);
    const auto* gradient = reinterpret_cast<const float*>(gradient_.data());
    auto* out = reinterpret_cast<float*>(planes_[0].data());
    for (const double share : options_.shares) {
      const auto kept = [share](const Share& part) {
        return static_cast<uint64_t>(static_cast<double>(part.last - part.first) * share);
      };
      std::vector<std::vector<uint32_t>> indices(team.size());
      std::vector<std::vector<float>> values(team.size());
      for (uint32_t t = 0; t < team.size(); ++t) {
        indices[t].resize(kept(share_of(elements_, t, team.size())));
        values[t].resize(indices[t].size());
      }
      timer_.time(
          team, {.kernel = "topk", .gradient = "f32", .share = share, .bytes = elements_ * 4},
          [&](uint32_t t) {
            const Share part = share_of(elements_, t, team.size());
            kernels::top_k(kernels::kernels(), {gradient + part.first, part.last - part.first},
                           kept(part), indices[t].data(), values[t].data());
          });
      const auto moved = static_cast<uint64_t>(static_cast<double>(elements_) * share) * 16;
      timer_.time(
          team, {.kernel = "scatter", .gradient = "f32", .share = share, .bytes = moved},
          [&](uint32_t t) {
            const Share part = share_of(elements_, t, team.size());
            kernels::scatter_add(indices[t], values[t], {out + part.first, part.last - part.first});
          });
    }
  }

  /// A step's gradients with feedback, from bf16 to messages, then one of these checked and
  /// expanded as on a device. What goes over the link is not counted in the bytes: it is far less
  /// than they.
  base::Status bench_compression(base::ThreadTeam& team) {
    fill_gradient(DataType::kBf16);
    const uint64_t blocks = base::divide_up(elements_, base::kBlockElements);
    SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, synthetic_space(elements_));
    for (const double share : options_.shares) {
      compress::CompressOptions options;
      options.density = share;
      options.values = options_.values.value_or(compress::ValueEncoding::kBf16);
      SI_ASSIGN_OR_RETURN(const auto compressor,
                          compress::GradientCompressor::make(options, elements_, 1,
                                                             compress::matrix_layouts(space)));
      std::vector<compress::GradientCompressor::Scratch> scratch(team.size());
      std::vector<compress::CompressedWriter> writers(team.size());
      base::ThreadTeam alone(1, "si-measure");  // what it does is not timed
      uint64_t step = 0;
      timer_.time(
          team,
          {.kernel = "compress",
           .gradient = "bf16",
           .share = share,
           .bytes = elements_ * 6,
           .warm_up = 20},  // until the residual is as large as it stays
          [&](uint32_t t) {
            const Share part = share_of(blocks, t, team.size());
            for (uint64_t b = part.first; b < part.last; b += kBlocksOfSubgroup) {
              const uint64_t first = b * base::kBlockElements;
              const uint64_t end = std::min(
                  elements_, std::min(part.last, b + kBlocksOfSubgroup) * base::kBlockElements);
              compressor->compress(scratch[t], writers[t],
                                   {base::SubgroupId{0}, first, end - first}, {});
            }
          },
          [&] {
            if (step++ > 0) compressor->commit();
            compressor->begin_step();
            // The same numbers at other places in every step.
            const uint64_t turned = step * 7919 * 64 % elements_;
            compressor->put(0, gradient_.data() + turned * 2, DataType::kBf16, elements_ - turned);
            compressor->put(elements_ - turned, gradient_.data(), DataType::kBf16, turned);
            compressor->begin_update(step, 1, 1, {}, alone);
          });
      const uint64_t elements = std::min(elements_, kBlocksOfSubgroup * base::kBlockElements);
      const auto message =
          compressor->compress(scratch[0], writers[0], {base::SubgroupId{0}, 0, elements}, {});
      timer_.time(team,
                  {.kernel = "expand", .gradient = "bf16", .share = share, .bytes = elements_ * 2},
                  [&](uint32_t t) {
                    const Share part = share_of(blocks, t, team.size());
                    auto* out = reinterpret_cast<std::byte*>(scratch[t].arrived.data());
                    for (uint64_t b = part.first; b < part.last;) {
                      const auto view = compress::CompressedView::parse(message);
                      SI_CHECK(view.ok(), "a message of our own");
                      for (uint64_t i = 0; i < view->blocks() && b < part.last; ++i, ++b) {
                        view->expand_block(i, out);
                      }
                    }
                  });
    }
    return {};
  }
  static constexpr uint64_t kBlocksOfSubgroup = 16;

  BenchOptions options_;
  uint64_t elements_;
  std::array<base::AlignedBuffer, 3> planes_;
  base::AlignedBuffer gradient_;
  base::AlignedBuffer weights_;
  KernelTimer timer_;
};

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const StateFormat format : base::all_state_formats()) {
    names.push_back(base::state_format_name(format));
  }
  return names;
}

}  // namespace

void add_bench_kernels(CLI::App& bench, Run& run) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = bench.add_subcommand(
      "kernels", "Time every kernel in turn with a triad that moves as many bytes");
  command->add_option("--params", options->params, "Elements in a run, e.g. 2e7")
      ->check(CLI::Range(1e4, 1e10))
      ->capture_default_str();
  command
      ->add_option("--repeat", options->repeat, "Number of runs, of which the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Numbers of threads [1 and all cores]")
      ->check(CLI::Range(1u, 1024u));
  command
      ->add_option(
          "--kernel", options->kernels,
          "Kernels to time; sealed-update is an update with checksums; compress also times expand "
          "[all]")
      ->check(CLI::IsMember({"update", "sealed-update", "norm", "cast", "checksum", "topk",
                             "matrix-squares", "step-ahead", "compress"}));
  command->add_option("--rule", options->rules, "Update rules [all]")
      ->check(CLI::IsMember(base::enum_name_list<kernels::UpdateRule>()));
  command->add_option("--format", options->formats, "State formats [all]")
      ->check(CLI::IsMember(format_names()));
  command->add_option("--gradient", options->gradients, "Gradient types [all]")
      ->check(CLI::IsMember(base::enum_name_list<base::DataType>()));
  command
      ->add_option("--weights", options->weights,
                   "Type of the new weights that an update writes beside the state")
      ->check(CLI::IsMember({"none", "bf16", "f32"}))
      ->capture_default_str();
  command
      ->add_option("--share", options->shares,
                   "Share of the elements that Top-K and compression select, e.g. 0.01")
      ->check(CLI::Range(1e-6, 1.0))
      ->capture_default_str();
  add_values_flag(*command, options->values, "bf16");
  command->add_flag("--json", options->json, "Print a JSON array with one object for each row");
  command->footer(
      "Examples:\n"
      "  smartinf bench kernels --rule adamw --gradient bf16\n"
      "  SMARTINF_FORCE_ISA=AVX2 smartinf bench kernels --kernel update --json");
  command->callback([options, &run] {
    run = [options] {
      base::Status status = kernels::forced_isa_status();
      if (status.ok()) status = KernelBench(*options).run();
      if (status.ok()) return kExitDone;
      fmt::print(stderr, "smartinf bench kernels: {}\n", status.to_string());
      return kExitFailed;
    };
  });
}

}  // namespace smartinf::apps

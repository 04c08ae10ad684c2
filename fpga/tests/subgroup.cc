#include "fpga/tests/subgroup.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <random>
#include <sstream>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/rules.h"
#include "smartinf/kernels/update.h"

namespace smartinf::fpga {
namespace {

using base::DataType;
using kernels::UpdateRule;

static_assert(sizeof(Word) == 64);
static_assert(sizeof(kernels::RuleScalars) == sizeof(Word));
static_assert(kBlockElements == base::kBlockElements);

constexpr size_t kBehind = 3;  // words that nobody may write

uint32_t number(std::mt19937_64& random, bool edges) {
  constexpr std::array<uint32_t, 12> kEdges{0,           0x80000000u, 1,           0x80000001u,
                                            0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u,
                                            0xff800000u, 0x7fc00000u, 0xffc12345u, 0x00012345u};
  const uint64_t bits = random();
  if (edges && bits % 8 == 0) return kEdges[bits / 8 % kEdges.size()];
  // Magnitudes of 2^-40 to 2^8, so that sums and quotients round in every place.
  const auto exponent = static_cast<uint32_t>(87 + (bits >> 32) % 48);
  return (static_cast<uint32_t>(bits) & 0x807fffffu) | exponent << 23;
}

size_t whole_words(uint64_t bytes) { return base::divide_up(bytes, sizeof(Word)); }

Word seed_word(uint64_t seed, uint64_t block, size_t planes) {
  Word word = 0;
  for (size_t p = 0; p < 2 * kPlanesMax; ++p) {
    if (p % kPlanesMax < planes) {
      set_wide_lane(word, static_cast<int>(p), base::mix_seed(seed, block * 8 + p));
    }
  }
  return word;
}

}  // namespace

const void* bytes_of(const std::vector<Word>& words) { return words.data(); }
uint8_t* bytes_of(std::vector<Word>& words) { return reinterpret_cast<uint8_t*>(words.data()); }

std::vector<Word> words_of(const void* bytes, size_t count) {
  std::vector<Word> words(whole_words(count));
  if (count > 0) std::memcpy(bytes_of(words), bytes, count);
  return words;
}

std::vector<Word> make_gradient(DataType type, uint32_t count, uint64_t seed, bool edges) {
  std::mt19937_64 random(seed * 2 + 1);
  std::vector<Word> words(whole_words(count * base::data_type_bytes(type)));
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = number(random, edges);
    if (type == DataType::kF32) {
      std::memcpy(bytes_of(words) + 4 * uint64_t{i}, &bits, 4);
    } else {
      const uint16_t upper = static_cast<uint16_t>(bits >> 16);
      std::memcpy(bytes_of(words) + 2 * uint64_t{i}, &upper, 2);
    }
  }
  return words;
}

Subgroup::Subgroup(UpdateRule rule, uint32_t elements, uint64_t seed, bool edges)
    : count(elements) {
  std::mt19937_64 random(seed * 2);
  const size_t words = whole_words(uint64_t{4} * count);
  planes.resize(kernels::rule_planes(rule).size());
  for (size_t p = 0; p < planes.size(); ++p) {
    planes[p].resize(words + kBehind);
    const bool variance = kernels::rule_planes(rule)[p] == base::PlaneKind::kVariance;
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t bits = number(random, edges);
      if (variance && !edges) bits &= 0x7fffffffu;
      std::memcpy(bytes_of(planes[p]) + 4 * uint64_t{i}, &bits, 4);
    }
    // Bytes behind a plane keep their values.
    for (size_t byte = 4 * uint64_t{count}; byte < sizeof(Word) * planes[p].size(); ++byte) {
      bytes_of(planes[p])[byte] = static_cast<uint8_t>(random());
    }
  }
}

CardTables Subgroup::prepare(const Step& step) {
  CardTables tables;
  for (const SpanOfScalars& span : step.spans) {
    Word head = 0;
    set_lane(head, 0, static_cast<uint32_t>(span.count));
    tables.spans.push_back(head);
    tables.spans.push_back(std::bit_cast<Word>(kernels::rule_scalars(span.scalars)));
  }
  tables.span_count = static_cast<uint32_t>(step.spans.size());
  for (uint64_t block = 0; block * kBlockElements < count; ++block) {
    tables.seeds.push_back(seed_word(step.checksum_seed, block, planes.size()));
  }
  report.assign(tables.seeds.size(), Word(0));
  weights.clear();
  if (step.weights_type) {
    tables.weights_type = *step.weights_type == DataType::kF32 ? kWeightsF32 : kWeightsBf16;
    weights.resize(whole_words(count * base::data_type_bytes(*step.weights_type)));
  }
  return tables;
}

std::string Subgroup::update_on_card(const Step& step, const GradientKernel& gradient,
                                     const software::Options& options) {
  const CardTables tables = prepare(step);
  software::Simulation run(options);
  hls::stream<GradientWord, 16> stream("gradients");
  run.start("gradient kernel", [&] { gradient(stream); });
  run.start("update kernel", [&] {
    std::vector<std::vector<Word>>& p = planes;
    switch (step.rule) {
      case UpdateRule::kAdam:
      case UpdateRule::kAdamW:
        return smartinf_update_adam(stream, p[0].data(), p[0].data(), p[1].data(), p[1].data(),
                                    p[2].data(), p[2].data(), weights.data(), tables.spans.data(),
                                    tables.seeds.data(), report.data(), count, tables.span_count,
                                    tables.weights_type);
      case UpdateRule::kSgdMomentum:
        return smartinf_update_sgd(stream, p[0].data(), p[0].data(), p[1].data(), p[1].data(),
                                   weights.data(), tables.spans.data(), tables.seeds.data(),
                                   report.data(), count, tables.span_count, tables.weights_type);
      case UpdateRule::kAdagrad:
        return smartinf_update_adagrad(stream, p[0].data(), p[0].data(), p[1].data(), p[1].data(),
                                       weights.data(), tables.spans.data(), tables.seeds.data(),
                                       report.data(), count, tables.span_count,
                                       tables.weights_type);
      case UpdateRule::kLion:
        SI_CHECK(false, "no kernel for it");
    }
  });
  std::string said = run.run();
  cycles = run.cycles();
  if (said.empty() && !stream.empty()) said = "gradients are left over";
  return said;
}

void Subgroup::update_by_truth(const Step& step, const void* gradient) {
  const auto truth = kernels::find_table("scalar");
  SI_CHECK(truth.ok(), "every machine has the scalar kernels");
  weights.clear();
  if (step.weights_type) {
    weights.resize(whole_words(count * base::data_type_bytes(*step.weights_type)));
  }
  report.assign(base::divide_up(count, kBlockElements), Word(0));
  size_t span = 0;
  uint64_t taken = 0;  // of that span
  for (uint64_t first = 0; first < count; first += kBlockElements) {
    const uint64_t block = first / kBlockElements;
    const uint64_t elements = std::min<uint64_t>(kBlockElements, count - first);
    const Word seeds = seed_word(step.checksum_seed, block, planes.size());
    const auto seal = [&](size_t way) {
      for (size_t p = 0; p < planes.size(); ++p) {
        const std::span<const std::byte> bytes(
            reinterpret_cast<const std::byte*>(planes[p].data()) + 4 * first, 4 * elements);
        const int at = static_cast<int>(way * kPlanesMax + p);
        if (bytes.size() > 240) {
          set_wide_lane(report[block], at, base::checksum(bytes, wide_lane(seeds, at)));
        }
      }
    };
    std::vector<kernels::ScalarsSpan> runs;
    for (uint64_t left = elements; left > 0;) {
      const SpanOfScalars& of = step.spans[span];
      const uint64_t some = std::min(left, of.count - taken);
      runs.push_back({some, &of.scalars});
      left -= some;
      taken += some;
      if (taken == of.count) {
        ++span;
        taken = 0;
      }
    }
    seal(0);
    kernels::UpdateBlock update;
    for (size_t p = 0; p < planes.size(); ++p) {
      update.planes[p] = reinterpret_cast<std::byte*>(planes[p].data()) + 4 * first;
    }
    update.count = elements;
    update.element = first;
    update.gradient =
        static_cast<const std::byte*>(gradient) + first * base::data_type_bytes(step.gradient_type);
    update.gradient_type = step.gradient_type;
    if (step.weights_type) {
      update.weights_type = *step.weights_type;
      update.weights_out = bytes_of(weights) + first * base::data_type_bytes(*step.weights_type);
    }
    (*truth)->update_block(base::StateFormat::kF32, update, runs);
    seal(1);
  }
}

bool Subgroup::operator==(const Subgroup& other) const { return difference(other).empty(); }

std::string Subgroup::difference(const Subgroup& other) const {
  std::ostringstream what;
  const auto compare = [&](const std::string& name, const std::vector<Word>& a,
                           const std::vector<Word>& b, size_t words) {
    for (size_t w = 0; w < words && what.str().empty(); ++w) {
      for (int i = 0; i < kLanes; ++i) {
        if (lane(a[w], i) == lane(b[w], i)) continue;
        what << name << ", 32-bit number " << w * kLanes + static_cast<size_t>(i) << ": "
             << std::hex << lane(a[w], i) << " and " << lane(b[w], i);
        break;
      }
    }
  };
  for (size_t p = 0; p < planes.size(); ++p) {
    compare("plane " + std::to_string(p), planes[p], other.planes[p], planes[p].size());
  }
  if (weights.size() != other.weights.size()) return "other weights";
  // F32 weights are whole words; behind the last element lies what lies behind the plane.
  std::vector<Word> mine = weights;
  std::vector<Word> others = other.weights;
  const bool f32 = !weights.empty() && weights.size() == whole_words(uint64_t{4} * count);
  for (uint64_t i = count; f32 && i < weights.size() * kLanes; ++i) {
    set_lane(mine.back(), static_cast<int>(i % kLanes), 0);
    set_lane(others.back(), static_cast<int>(i % kLanes), 0);
  }
  compare("weights", mine, others, mine.size());
  compare("checksums", report, other.report, report.size());
  return what.str();
}

GradientKernel dense_gradient(const std::vector<Word>& gradient, DataType type, uint32_t count) {
  return [&gradient, type, count](hls::stream<GradientWord>& out) {
    smartinf_gradient_dense(gradient.data(), count,
                            type == DataType::kF32 ? kGradientF32 : kGradientBf16, out);
  };
}

}  // namespace smartinf::fpga

// Updates one subgroup of test numbers with an xclbin's kernels and compares every bit of planes,
// weights and checksums with the scalar truth. What a host does for each subgroup stands here.
#include <bit>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/compress/message.h"

#include "fpga/host/card.h"
#include "fpga/tests/subgroup.h"

namespace smartinf::fpga {
namespace {

using base::DataType;
using base::ErrorCode;
using base::Status;

constexpr const char* kHelp =
    "Usage: update_on_card XCLBIN [ELEMENTS [PART]]\n\n"
    "XCLBIN is called smartinf_RULE_GRADIENT.TARGET.xclbin, as the Makefile names it; ELEMENTS is\n"
    "1000000 unless given; PART is part of the card's name (xbutil examine) where there are "
    "more.\n";

/// Choice that the file's name says.
struct Choice {
  std::string rule;
  std::string gradient;
};
base::Result<Choice> choice_of(const std::filesystem::path& xclbin) {
  const std::string name = xclbin.filename().string();
  for (const char* rule : {"adam", "sgd", "adagrad"}) {
    for (const char* gradient : {"dense", "pairs", "message"}) {
      const std::string begin = std::string("smartinf_") + rule + "_" + gradient + ".";
      if (name.starts_with(begin) && name.ends_with(".xclbin")) return Choice{rule, gradient};
    }
  }
  return Status(ErrorCode::kInvalidArgument, "\"" + name + "\" names no rule and gradient",
                "It is smartinf_RULE_GRADIENT.TARGET.xclbin: adam, sgd or adagrad; dense, pairs or "
                "message.");
}

/// A gradient as the card gets it, and as it arrives at the update.
struct Gradient {
  DataType type = DataType::kF32;
  std::vector<Word> on_card;
  uint64_t amount = 0;  // pairs, or bytes of a message
  std::vector<Word> arrived;
};

Gradient make_gradient_for(const std::string& kind, uint32_t count) {
  Gradient gradient;
  if (kind == "dense") {
    gradient.type = DataType::kBf16;
    gradient.on_card = gradient.arrived = make_gradient(DataType::kBf16, count, 7, true);
    return gradient;
  }
  // One in 97, and what the message's values in bf16 become.
  constexpr uint32_t kEvery = 97;
  const std::vector<Word> all = make_gradient(DataType::kF32, count, 7, false);
  std::vector<float> dense(count);
  std::vector<uint32_t> pairs;
  compress::CompressedWriter writer;
  writer.begin(base::SubgroupId{1}, count, compress::ValueEncoding::kBf16, {});
  for (uint32_t first = 0; first < count; first += kBlockElements) {
    std::vector<uint32_t> indices;
    std::vector<float> values;
    for (uint32_t i = 0; i < smaller(kBlockElements, count - first); i += kEvery) {
      const uint32_t at = first + i;
      indices.push_back(i);
      values.push_back(std::bit_cast<float>(lane(all[at / kLanes], static_cast<int>(at % kLanes))));
    }
    std::vector<float> arrived(values.size());
    writer.add_block(indices, values, arrived);
    if (kind == "pairs") arrived = values;
    for (size_t k = 0; k < indices.size(); ++k) {
      dense[first + indices[k]] = arrived[k];
      pairs.insert(pairs.end(), {first + indices[k], std::bit_cast<uint32_t>(values[k])});
    }
  }
  const auto message = writer.finish();
  gradient.on_card = kind == "pairs" ? words_of(pairs.data(), pairs.size() * sizeof(uint32_t))
                                     : words_of(message.data(), message.size());
  gradient.amount = kind == "pairs" ? pairs.size() / 2 : message.size();
  gradient.arrived = words_of(dense.data(), dense.size() * sizeof(float));
  return gradient;
}

/// Buffers of one step on the card, and the words behind them.
struct Buffers {
  std::vector<CardBuffer> planes;
  CardBuffer weights, spans, seeds, report, gradient, status;
};

/// The update kernel's arguments; 0 is the stream (job.h).
Status give_update(const Card& card, CardKernel& update, Subgroup& subgroup, CardTables& tables,
                   Buffers& buffers) {
  cl_uint next = 1;
  for (std::vector<Word>& plane : subgroup.planes) {
    SI_ASSIGN_OR_RETURN(CardBuffer buffer, card.buffer(plane, update, next));
    SI_RETURN_IF_ERROR(Card::share(buffer, update, next + 1));  // in place
    SI_RETURN_IF_ERROR(card.write(buffer));
    buffers.planes.push_back(std::move(buffer));
    next += 2;
  }
  const auto give = [&](CardBuffer& buffer, std::vector<Word>& words) -> Status {
    SI_ASSIGN_OR_RETURN(buffer, card.buffer(words, update, next));
    ++next;
    return card.write(buffer);
  };
  SI_RETURN_IF_ERROR(give(buffers.weights, subgroup.weights));
  SI_RETURN_IF_ERROR(give(buffers.spans, tables.spans));
  SI_RETURN_IF_ERROR(give(buffers.seeds, tables.seeds));
  SI_RETURN_IF_ERROR(give(buffers.report, subgroup.report));
  SI_RETURN_IF_ERROR(update.set(next, subgroup.count));
  SI_RETURN_IF_ERROR(update.set(next + 1, tables.span_count));
  return update.set(next + 2, tables.weights_type);
}

Status give_gradient(const Card& card, CardKernel& kernel, const std::string& kind,
                     Gradient& gradient, uint32_t count, std::vector<Word>& status,
                     Buffers& buffers) {
  SI_ASSIGN_OR_RETURN(buffers.gradient, card.buffer(gradient.on_card, kernel, 0));
  SI_RETURN_IF_ERROR(card.write(buffers.gradient));
  const auto amount = static_cast<uint32_t>(gradient.amount);
  if (kind == "dense") {
    SI_RETURN_IF_ERROR(kernel.set(1, count));
    return kernel.set(2, kGradientBf16);
  }
  cl_uint next = 1;
  if (kind == "pairs") {
    SI_RETURN_IF_ERROR(kernel.set(next++, amount));
  } else {
    for (; next < 4; ++next) SI_RETURN_IF_ERROR(Card::share(buffers.gradient, kernel, next));
    SI_RETURN_IF_ERROR(kernel.set(next++, gradient.amount));
  }
  SI_RETURN_IF_ERROR(kernel.set(next++, count));
  SI_ASSIGN_OR_RETURN(buffers.status, card.buffer(status, kernel, next));
  return card.write(buffers.status);
}

Status update_on_card(const std::filesystem::path& xclbin, uint32_t count,
                      const std::string& part) {
  SI_ASSIGN_OR_RETURN(const Choice choice, choice_of(xclbin));
  SI_ASSIGN_OR_RETURN(const Card card, Card::open(xclbin, part));
  std::printf("%s, %s on %s\n", choice.rule.c_str(), choice.gradient.c_str(), card.name().c_str());
  Step step;
  if (choice.rule == "sgd") step.rule = kernels::UpdateRule::kSgdMomentum;
  if (choice.rule == "adagrad") step.rule = kernels::UpdateRule::kAdagrad;
  step.count = count;
  kernels::RuleOptions options;
  options.rule = step.rule;
  const uint32_t half = count / 2;  // two groups of parameters, in most cases cut inside a word
  if (half > 0)
    step.spans.push_back({half, kernels::make_step_scalars(options, {1e-2}, 2, 0.5, 3)});
  step.spans.push_back({count - half, kernels::make_step_scalars(options, {3e-3}, 2, 0.5, 3)});
  Gradient gradient = make_gradient_for(choice.gradient, count);
  step.gradient_type = gradient.type;

  Subgroup subgroup(step.rule, count, 1, true);
  Subgroup truth = subgroup;
  truth.update_by_truth(step, bytes_of(gradient.arrived));
  CardTables tables = subgroup.prepare(step);
  std::vector<Word> status(1, Word(0));
  Buffers buffers;
  SI_ASSIGN_OR_RETURN(CardKernel update, card.kernel("smartinf_update_" + choice.rule, "update"));
  SI_ASSIGN_OR_RETURN(CardKernel source,
                      card.kernel("smartinf_gradient_" + choice.gradient, "gradient"));
  SI_RETURN_IF_ERROR(give_update(card, update, subgroup, tables, buffers));
  SI_RETURN_IF_ERROR(
      give_gradient(card, source, choice.gradient, gradient, count, status, buffers));
  SI_ASSIGN_OR_RETURN(const double seconds, card.run(source, update));
  for (const CardBuffer& plane : buffers.planes) SI_RETURN_IF_ERROR(card.read(plane));
  SI_RETURN_IF_ERROR(card.read(buffers.weights));
  SI_RETURN_IF_ERROR(card.read(buffers.report));
  if (choice.gradient != "dense") SI_RETURN_IF_ERROR(card.read(buffers.status));
  if (lane(status[0], 0) != kStatusOk) {
    return Status(ErrorCode::kCorrupt,
                  "the gradient's status is " + std::to_string(lane(status[0], 0)));
  }
  if (const std::string difference = subgroup.difference(truth); !difference.empty()) {
    return Status(ErrorCode::kCorrupt, "the card has other bits (card and truth): " + difference);
  }
  std::printf("%u elements, the same bits; %.3g s with start and end, %.3g elements/s\n", count,
              seconds, count / seconds);
  return Status();
}

}  // namespace
}  // namespace smartinf::fpga

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  uint32_t count = 1'000'000;
  bool understood = !arguments.empty() && arguments.size() <= 3 && !arguments[0].starts_with("-");
  if (understood && arguments.size() > 1) {
    const char* end = arguments[1].data() + arguments[1].size();
    const auto [at, error] = std::from_chars(arguments[1].data(), end, count);
    understood = error == std::errc() && at == end && count > 0;
  }
  if (!understood) {
    std::fputs(smartinf::fpga::kHelp, stderr);
    return 2;
  }
  const smartinf::base::Status status =
      smartinf::fpga::update_on_card(arguments[0], count, arguments.size() > 2 ? arguments[2] : "");
  if (status.ok()) return 0;
  std::fprintf(stderr, "update_on_card: %s\n", status.to_string().c_str());
  return 1;
}

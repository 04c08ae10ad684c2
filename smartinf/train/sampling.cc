#include "smartinf/train/sampling.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "smartinf/train/random.h"

namespace smartinf::train {
namespace {

struct Candidate {
  double score = 0;
  int64_t token = 0;
};

/// Likelier ones first, of equals the first; NaN, which a damaged model gives, before all.
bool is_likelier(const Candidate& a, const Candidate& b) {
  if (a.score > b.score) return true;
  if (a.score < b.score) return false;
  const bool a_is_nan = std::isnan(a.score);
  const bool b_is_nan = std::isnan(b.score);
  return a_is_nan != b_is_nan ? a_is_nan : a.token < b.token;
}

/// The likeliest as is_likelier() has it, without a list of candidates.
int64_t largest(std::span<const float> logits) {
  size_t at = 0;
  for (size_t i = 1; i < logits.size() && !std::isnan(logits[at]); ++i) {
    if (!(logits[i] <= logits[at])) at = i;
  }
  return static_cast<int64_t>(at);
}

}  // namespace

int64_t choose_token(std::span<const float> logits, const Sampling& sampling, uint64_t draw) {
  if (sampling.temperature == 0) return largest(logits);
  std::vector<Candidate> all(logits.size());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = {static_cast<double>(logits[i]), static_cast<int64_t>(i)};
  }
  for (Candidate& one : all) one.score /= sampling.temperature;
  if (sampling.top_k != 0 && sampling.top_k < all.size()) {
    std::ranges::nth_element(all, all.begin() + sampling.top_k, is_likelier);
    all.resize(sampling.top_k);
  }
  const double most = std::ranges::min_element(all, is_likelier)->score;
  double total = 0;
  for (const Candidate& one : all) total += std::exp(one.score - most);
  const double uniform = random_uniform(sampling.seed, draw);
  // Only as many are put into order as it takes: a share of one number for each token, the
  // likeliest first, laid end to end.
  for (size_t sorted = std::min<size_t>(64, all.size());;
       sorted = std::min(8 * sorted, all.size())) {
    const auto end = all.begin() + static_cast<std::ptrdiff_t>(sorted);
    std::ranges::partial_sort(all, end, is_likelier);
    std::vector<double> sums;  // of shares, as far as tokens are kept
    double sum = 0;
    for (size_t i = 0; i < sorted && (i == 0 || sum < sampling.top_p); ++i) {
      sums.push_back(sum += std::exp(all[i].score - most) / total);
    }
    const bool complete = sum >= sampling.top_p || sorted == all.size();
    const double drawn = uniform * (complete ? sum : 1.0);
    if (!complete && (sampling.top_p < 1 || drawn >= sum)) continue;
    const auto at = std::ranges::upper_bound(sums, drawn) - sums.begin();
    return all[std::min(static_cast<size_t>(at), sums.size() - 1)].token;
  }
}

base::Status validate(const Sampling& sampling) {
  const auto wrong = [](const char* flag, double value, const char* advice) {
    return base::Status(base::ErrorCode::kInvalidArgument, fmt::format("{} is {}", flag, value),
                        advice);
  };
  if (!(sampling.temperature >= 0 && sampling.temperature <= 100)) {
    return wrong("--temperature", sampling.temperature, "Choose a number from 0 to 100.");
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    return wrong("--top-p", sampling.top_p, "Choose a number above 0, up to 1.");
  }
  return base::Status();
}

}  // namespace smartinf::train

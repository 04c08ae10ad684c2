#include "smartinf/train/batch/shared_prefixes.h"

#include <algorithm>
#include <numeric>

namespace smartinf::train {
namespace {

using Tokens = std::span<const int64_t>;

class Search {
 public:
  Search(Prompts prompts, Prompts kept, uint64_t part)
      : prompts_(prompts),
        kept_(kept),
        part_(part),
        order_(prompts.size()),
        chosen_(order_.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::ranges::sort(order_, [&](size_t a, size_t b) {
      return std::ranges::lexicographical_compare(prompts_[a], prompts_[b]);
    });
    for (size_t i = 1; i < order_.size(); ++i) {
      const Tokens a = prompts_[order_[i - 1]];
      const Tokens b = prompts_[order_[i]];
      const auto same = static_cast<uint64_t>(std::ranges::mismatch(a, b).in1 - a.begin());
      common_.push_back(std::min({same / part_, whole(order_[i - 1]), whole(order_[i])}));
    }
  }

  std::vector<uint64_t> run() {
    if (!order_.empty()) choose(0, order_.size());
    return std::move(chosen_);
  }

 private:
  /// Parts that a prompt may share.
  uint64_t whole(size_t prompt) const {
    return (std::max<size_t>(1, prompts_[prompt].size()) - 1) / part_;
  }
  /// The longest beginning that is kept and that a prompt has, of at most so many parts.
  uint64_t kept_parts(size_t prompt, uint64_t most) const {
    uint64_t longest = 0;
    for (const Tokens kept : kept_) {
      const uint64_t parts = kept.size() / part_;
      if (parts <= most && std::ranges::equal(kept, prompts_[prompt].first(kept.size()))) {
        longest = std::max(longest, parts);
      }
    }
    return longest;
  }
  /// Chooses for the prompts [begin, end) of the order; returns the parts that are saved.
  uint64_t choose(size_t begin, size_t end) {
    const size_t count = end - begin;
    const auto first = common_.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = first + static_cast<std::ptrdiff_t>(count - 1);
    const uint64_t all = count == 1 ? whole(order_[begin]) : *std::min_element(first, last);
    uint64_t saved = 0;
    for (size_t from = begin, i = begin + 1; count > 1 && i <= end; ++i) {
      if (i < end && common_[i - 1] > all) continue;
      saved += choose(from, i);
      from = i;
    }
    const uint64_t kept = kept_parts(order_[begin], all);
    const uint64_t parts = kept * count >= all * (count - 1) ? kept : all;
    const uint64_t together = std::max(kept * count, all * (count - 1));
    if (together == 0 || together < saved) return saved;
    for (size_t i = begin; i < end; ++i) chosen_[order_[i]] = parts * part_;
    return together;
  }

  const Prompts prompts_;
  const Prompts kept_;
  const uint64_t part_;
  std::vector<size_t> order_;     // prompts
  std::vector<uint64_t> common_;  // parts that a prompt of the order has in common with the next
  std::vector<uint64_t> chosen_;
};

}  // namespace

std::vector<uint64_t> shared_prefixes(Prompts prompts, Prompts kept, uint64_t part) {
  return Search(prompts, kept, part).run();
}

}  // namespace smartinf::train

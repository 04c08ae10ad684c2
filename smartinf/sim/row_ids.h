// Row numbers of steps that look rows of a table up, as benchmarks and the simulator draw them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <unordered_set>
#include <vector>

namespace smartinf::sim {

/// Ranks of Zipf's law, 1 to n; of rank k the weight is (k + shift)^-exponent. Source: Hörmann and
/// Derflinger 1996 (rejection-inversion).
class Zipf {
 public:
  Zipf(uint64_t n, double exponent, double shift = 0)
      : n_(n),
        exponent_(exponent),
        shift_(shift),
        first_(integral(1.5) - density(1)),
        last_(integral(static_cast<double>(n) + 0.5)),
        squeeze_(2 - inverse(integral(2.5) - density(2))) {}

  /// Of all weights.
  double sum() const {
    const auto summed = static_cast<uint64_t>(std::min(1e5, static_cast<double>(n_)));
    double sum =
        integral(static_cast<double>(n_) + 0.5) - integral(static_cast<double>(summed) + 0.5);
    for (uint64_t k = summed; k > 0; --k) sum += density(static_cast<double>(k));
    return sum;
  }

  uint64_t operator()(std::mt19937_64& random) const {
    std::uniform_real_distribution<double> uniform(0, 1);
    for (;;) {
      const double u = last_ + uniform(random) * (first_ - last_);
      const double x = inverse(u);
      const double k = std::clamp(std::round(x), 1.0, static_cast<double>(n_));
      if (k - x <= squeeze_ || u >= integral(k + 0.5) - density(k)) {
        return static_cast<uint64_t>(k);
      }
    }
  }

 private:
  bool logarithmic() const { return std::abs(exponent_ - 1) < 1e-9; }
  double density(double x) const { return std::pow(x + shift_, -exponent_); }
  double integral(double x) const {
    x += shift_;
    return logarithmic() ? std::log(x) : (std::pow(x, 1 - exponent_) - 1) / (1 - exponent_);
  }
  double inverse(double y) const {
    const double x =
        logarithmic() ? std::exp(y) : std::pow(1 + y * (1 - exponent_), 1 / (1 - exponent_));
    return x - shift_;
  }

  uint64_t n_;
  double exponent_, shift_, first_, last_, squeeze_;
};

/// Ids of one step after another. With an exponent of 0 all rows are alike, and `distinct` makes
/// those of a step differ, of which there are at most half as many as rows. Ranks of Zipf's law are
/// scattered over the table, as hashed ids are.
class RowIds {
 public:
  /// Of a table of rows * every rows: those in the middle of each so many ranks, numbered by
  /// themselves.
  RowIds(uint64_t rows, double zipf, bool distinct, uint64_t every = 1)
      : rows_(rows),
        exponent_(zipf),
        distinct_(distinct),
        zipf_(rows, zipf, every == 1 ? 0 : -0.5),
        share_(1.0 / static_cast<double>(every)) {
    if (every == 1 || zipf == 0) return;
    share_ = std::pow(share_, zipf) * zipf_.sum() / Zipf(rows * every, zipf).sum();
  }

  /// Of so many ids of the whole table those of these rows.
  std::vector<int64_t> next(uint64_t ids) {
    std::vector<int64_t> kept;
    std::unordered_set<uint64_t> seen;
    const auto count = static_cast<uint64_t>(std::llround(static_cast<double>(ids) * share_));
    while (kept.size() < count) {
      if (exponent_ > 0) {
        kept.push_back(scattered(zipf_(random_)));
      } else if (const uint64_t row = random_() % rows_; !distinct_ || seen.insert(row).second) {
        kept.push_back(static_cast<int64_t>(row));
      }
    }
    return kept;
  }

 private:
  int64_t scattered(uint64_t rank) const {
    // A large prime times the rank is another row for every rank, unless it divides the rows.
    constexpr uint64_t kPrime = 2'654'435'761;
    return static_cast<int64_t>(
        static_cast<uint64_t>(static_cast<__uint128_t>(rank) * kPrime % rows_));
  }

  uint64_t rows_;
  double exponent_;
  bool distinct_;
  std::mt19937_64 random_{1};
  Zipf zipf_;
  double share_;  // of all ids
};

}  // namespace smartinf::sim

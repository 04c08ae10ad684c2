#include "smartinf/base/nearest.h"

#include <algorithm>
#include <string>
#include <vector>

namespace smartinf::base {
namespace {

// Longer ones are nobody's slip of the finger, and the table below is quadratic.
constexpr size_t kLengthMax = 64;

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-') c = '_';
  }
  return out;
}

std::string_view last_part(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

}  // namespace

size_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the usual table; three of them, because a swap looks two rows back.
  std::vector<size_t> before(b.size() + 1);
  std::vector<size_t> above(b.size() + 1);
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) above[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(above);
    above.swap(row);
  }
  return above[b.size()];
}

bool same_name(std::string_view a, std::string_view b) { return lower(a) == lower(b); }

std::string_view nearest_name(std::string_view name, std::span<const std::string_view> candidates) {
  if (name.size() > kLengthMax) return {};
  const std::string wanted = lower(name);
  std::string_view best;
  size_t best_distance = ~size_t{0};
  for (const std::string_view candidate : candidates) {
    const std::string offered = lower(candidate);
    size_t distance = edit_distance(wanted, offered);
    size_t limit = std::max<size_t>(2, offered.size() / 3);
    if (wanted.find('.') != std::string::npos || offered.find('.') != std::string::npos) {
      const std::string_view tail = last_part(offered);
      // A wrong section costs as much as one wrong letter.
      const size_t by_tail = edit_distance(last_part(wanted), tail) + 1;
      if (by_tail < distance && by_tail <= 1 + tail.size() / 3) {
        distance = by_tail;
        limit = by_tail;
      }
    }
    // Between equals a letter replaced is likelier than one lost: gpt2-16.7B means gpt2-16.6B.
    const bool same_length = offered.size() == wanted.size() && best.size() != wanted.size();
    const bool nearer = distance < best_distance || (distance == best_distance && same_length);
    if (distance <= limit && nearer && distance < offered.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace smartinf::base

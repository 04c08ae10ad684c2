#include "smartinf/train/parameter_groups.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fnmatch.h>

#include "smartinf/base/nearest.h"

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr double kNumberMax = 1e6;

struct Pattern {
  std::string text;
  double number = 0;
};

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

Result<Pattern> parse(std::string_view key, std::string_view entry) {
  const size_t equals = entry.rfind('=');
  const std::string_view text = trim(entry.substr(0, equals));
  const std::string_view number =
      equals == std::string_view::npos ? "" : trim(entry.substr(equals + 1));
  Pattern pattern{.text = std::string(text)};
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), pattern.number);
  const bool read = error == std::errc() && end == number.data() + number.size();
  if (text.empty() || !read || !(pattern.number >= 0 && pattern.number <= kNumberMax)) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{} has \"{}\"", key, entry),
                  fmt::format("Write \"PATTERN = NUMBER\" with a number from 0 to {}, e.g. "
                              "\"*layernorm.weight = 0\"",
                              kNumberMax));
  }
  return pattern;
}

// Whole names, and what stands between their dots.
std::string meant(std::string_view pattern, const plan::ParameterSpace& space) {
  std::set<std::string_view> names;
  for (const plan::ParameterRange& range : space.ranges()) {
    std::string_view rest = range.name;
    names.insert(rest);
    for (size_t dot = rest.find('.'); dot != std::string_view::npos; dot = rest.find('.')) {
      names.insert(rest.substr(0, dot));
      rest.remove_prefix(dot + 1);
    }
  }
  std::string plain;
  for (const char c : pattern) {
    if (c != '*' && c != '?') plain += c;
  }
  while (plain.starts_with('.')) plain.erase(0, 1);
  while (plain.ends_with('.')) plain.pop_back();
  const std::vector<std::string_view> candidates(names.begin(), names.end());
  return std::string(base::nearest_name(plain, candidates));
}

/// The patterns of a key, each of which fits some name.
Result<std::vector<Pattern>> patterns_of(std::string_view key,
                                         const std::vector<std::string>& entries,
                                         const plan::ParameterSpace& space) {
  std::vector<Pattern> patterns;
  for (const std::string& entry : entries) {
    SI_ASSIGN_OR_RETURN(Pattern pattern, parse(key, entry));
    const auto& ranges = space.ranges();
    const bool fits = std::any_of(ranges.begin(), ranges.end(), [&](const auto& range) {
      return matches(pattern.text, range.name);
    });
    if (!fits) {
      const std::string nearest = meant(pattern.text, space);
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: no parameter is called \"{}\"", key, pattern.text),
          nearest.empty()
              ? fmt::format("A pattern matches whole names, such as {}; * stands for any text",
                            ranges.back().name)
              : fmt::format("Did you mean {}? A pattern matches whole names, such as {}; * stands "
                            "for any text",
                            nearest, ranges.back().name));
    }
    patterns.push_back(std::move(pattern));
  }
  return patterns;
}

/// The place of the last pattern that fits, from 1; 0: none does.
size_t last_match(const std::vector<Pattern>& patterns, const std::string& name) {
  for (size_t i = patterns.size(); i > 0; --i) {
    if (matches(patterns[i - 1].text, name)) return i;
  }
  return 0;
}

}  // namespace

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

Result<GroupedParameters> group_parameters(const plan::ParameterSpace& space,
                                           const TrainOptions& train) {
  SI_ASSIGN_OR_RETURN(const std::vector<Pattern> factors,
                      patterns_of("train.lr_factors", train.lr_factors, space));
  SI_ASSIGN_OR_RETURN(const std::vector<Pattern> decays,
                      patterns_of("train.weight_decays", train.weight_decays, space));
  GroupedParameters grouped;
  grouped.groups.resize(model::kGroups);
  grouped.groups[model::kMatrixGroup].weight_decay = train.weight_decay;
  std::map<std::tuple<uint32_t, size_t, size_t>, uint32_t> numbers;
  for (const plan::ParameterRange& range : space.ranges()) {
    const size_t factor = last_match(factors, range.name);
    const size_t decay = last_match(decays, range.name);
    uint32_t group = range.group;
    if (factor != 0 || decay != 0) {
      const auto next = static_cast<uint32_t>(grouped.groups.size());
      const auto [known, added] = numbers.try_emplace({range.group, factor, decay}, next);
      group = known->second;
      if (added) {
        ParameterGroup own = grouped.groups[range.group];
        if (factor != 0) own.lr_factor = factors[factor - 1].number;
        if (decay != 0) own.weight_decay = decays[decay - 1].number;
        grouped.groups.push_back(own);
      }
    }
    SI_RETURN_IF_ERROR(grouped.space.add(range.name, range.shape, group));
  }
  return grouped;
}

Result<GroupedParameters> group_model(const model::Architecture& model, const TrainOptions& train) {
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace whole, model::make_parameter_space(model.whole()));
  SI_ASSIGN_OR_RETURN(GroupedParameters grouped, group_parameters(whole, train));
  if (!model.table_embedding) return grouped;
  const plan::ParameterSpace all = std::exchange(grouped.space, {});
  const plan::ParameterRange& table = all.ranges().front();
  grouped.table_lr_factor = grouped.groups[table.group].lr_factor;
  for (const plan::ParameterRange& range : all.ranges()) {
    if (range.name == table.name) continue;
    SI_RETURN_IF_ERROR(grouped.space.add(range.name, range.shape, range.group));
  }
  return grouped;
}

}  // namespace smartinf::train

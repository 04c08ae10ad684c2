#include "smartinf/train/ranks/ranks.h"

#include <utility>

namespace smartinf::train {

using base::Result;
using base::Status;

namespace {
constexpr auto kChannel = engine::Channel::kControl;
}

Status Ranks::all_ok(std::string_view doing, const Status& mine) const {
  return alone() ? mine : engine::all_ok(*collectives_, kChannel, doing, mine);
}

Status Ranks::all_ok_without_timeout(std::string_view doing, const Status& mine) const {
  if (!alone()) SI_RETURN_IF_ERROR(collectives_->barrier_without_timeout());
  return all_ok(doing, mine);
}

Result<std::string> Ranks::from_first(std::string text) const {
  if (alone()) return text;
  SI_RETURN_IF_ERROR(engine::broadcast(*collectives_, kChannel, text, /*root=*/0));
  return text;
}

Result<std::vector<std::string>> Ranks::all_texts(std::string mine) const {
  if (alone()) return std::vector{std::move(mine)};
  return engine::all_gather(*collectives_, kChannel, mine);
}

Status Ranks::barrier() const { return alone() ? Status() : collectives_->barrier(kChannel); }

}  // namespace smartinf::train

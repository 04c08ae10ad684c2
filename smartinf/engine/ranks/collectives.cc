#include "smartinf/engine/ranks/collectives.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/engine/ranks/messages.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

std::span<std::byte> bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span(text.data(), text.size()));
}

Status wait(Collectives::Started started) {
  if (!started.ok()) return std::move(started).status();
  return (*started)->wait();
}

Status unsupported(const char* what) {
  return Status(ErrorCode::kUnsupported, fmt::format("{} of these ranks", what));
}

}  // namespace

Result<std::shared_ptr<Collectives>> Collectives::group(std::span<const uint32_t>) {
  return unsupported("a group");
}
Collectives::Started Collectives::send(Channel, std::span<const std::byte>, uint32_t) {
  return unsupported("a message between two");
}
Collectives::Started Collectives::receive(Channel, std::span<std::byte>, uint32_t) {
  return unsupported("a message between two");
}

Status broadcast(Collectives& ranks, Channel channel, std::span<std::byte> bytes, uint32_t root) {
  return wait(ranks.broadcast(channel, bytes, root));
}

Status broadcast(Collectives& ranks, Channel channel, std::string& text, uint32_t root) {
  uint64_t size = text.size();
  SI_RETURN_IF_ERROR(broadcast(ranks, channel, std::as_writable_bytes(std::span(&size, 1)), root));
  text.resize(size);
  return size == 0 ? Status() : broadcast(ranks, channel, bytes_of(text), root);
}

Status all_gather(Collectives& ranks, Channel channel, std::span<const std::byte> mine,
                  std::span<std::byte> all) {
  SI_CHECK(all.size() == mine.size() * ranks.world(), "a gather into other memory than that");
  return wait(ranks.all_gather(channel, mine, all));
}

Result<std::vector<std::string>> all_gather(Collectives& ranks, Channel channel,
                                            std::string_view mine) {
  // Most texts are short: they go with their sizes.
  struct Head {
    uint64_t size = 0;
    std::array<char, 248> text{};
  };
  Head head{mine.size()};
  mine.copy(head.text.data(), head.text.size());
  std::vector<Head> heads(ranks.world());
  SI_RETURN_IF_ERROR(all_gather(ranks, channel, std::as_bytes(std::span(&head, 1)),
                                std::as_writable_bytes(std::span(heads))));
  std::vector<std::string> texts;
  uint64_t most = 0;
  for (const Head& one : heads) {
    texts.emplace_back(one.text.data(), std::min<uint64_t>(one.size, one.text.size()));
    most = std::max(most, one.size);
  }
  if (most <= head.text.size()) return texts;
  std::string padded(mine);
  padded.resize(most);
  std::string all(most * ranks.world(), '\0');
  SI_RETURN_IF_ERROR(all_gather(ranks, channel, bytes_of(padded), bytes_of(all)));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank] = all.substr(rank * most, heads[rank].size);
  }
  return texts;
}

Agreement agree(Collectives& ranks, Channel channel, std::string_view call, const Status& mine) {
  auto texts = all_gather(ranks, channel, pack(call, mine));
  if (!texts.ok()) return {std::move(texts).status(), false};
  std::vector<std::string> calls;
  Status first;
  const bool alike = std::all_of(texts->begin(), texts->end(),
                                 [&](const std::string& text) { return text == texts->front(); });
  for (size_t rank = 0; rank < texts->size(); ++rank) {
    Status status;
    const Status read = unpack((*texts)[rank], calls.emplace_back(), status);
    if (!read.ok()) status = read;
    if (first.ok() && !status.ok()) {
      first = alike ? std::move(status)
                    : std::move(status).with_context(
                          fmt::format("rank {}", ranks.rank_of_run(static_cast<uint32_t>(rank))));
    }
  }
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    if (calls[rank] == calls[0]) continue;
    return {Status(ErrorCode::kFailedPrecondition,
                   fmt::format("the ranks are not at the same call: rank {} is at {}, and rank {} "
                               "at {}",
                               ranks.rank_of_run(0), calls[0],
                               ranks.rank_of_run(static_cast<uint32_t>(rank)), calls[rank]),
                   "Call the updater alike on all ranks, and give all of them the same options."),
            false};
  }
  return {std::move(first), true};
}

Status all_ok(Collectives& ranks, Channel channel, std::string_view call, const Status& mine) {
  return agree(ranks, channel, call, mine).status;
}

}  // namespace smartinf::engine

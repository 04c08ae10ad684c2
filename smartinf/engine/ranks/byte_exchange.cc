#include "smartinf/engine/ranks/byte_exchange.h"

#include <memory>
#include <numeric>

namespace smartinf::engine {

base::Result<std::vector<std::vector<std::byte>>> exchange(
    Collectives& ranks, Channel channel, std::string_view call, const base::Status& mine,
    std::span<const std::vector<std::byte>> to) {
  SI_RETURN_IF_ERROR(all_ok(ranks, channel, call, mine));
  std::vector<uint64_t> sizes;
  std::vector<std::byte> sent;
  for (const std::vector<std::byte>& one : to) {
    sizes.push_back(one.size());
    sent.insert(sent.end(), one.begin(), one.end());
  }
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> of_all,
                      all_gather_values(ranks, channel, std::span<const uint64_t>(sizes)));
  std::vector<uint64_t> received;
  for (uint32_t rank = 0; rank < ranks.world(); ++rank) {
    received.push_back(of_all[rank * ranks.world() + ranks.rank()]);
  }
  std::vector<std::byte> got(std::reduce(received.begin(), received.end()));
  SI_ASSIGN_OR_RETURN(const auto pending, ranks.all_to_all(channel, sent, sizes, got, received));
  SI_RETURN_IF_ERROR(pending->wait());
  std::vector<std::vector<std::byte>> parts;
  auto at = got.begin();
  for (const uint64_t bytes : received) {
    const auto end = at + static_cast<ptrdiff_t>(bytes);
    parts.emplace_back(at, end);
    at = end;
  }
  return parts;
}

}  // namespace smartinf::engine

#include "smartinf/engine/device_share.h"

#include <cmath>
#include <map>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/density.h"
#include "smartinf/compress/message.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/memory_plan.h"

namespace smartinf::engine {

namespace {

/// Bytes that a block of a compressed gradient may take, with its directory entry; 0: not
/// compressed.
uint64_t compressed_block_bytes(const UpdaterOptions& options) {
  const compress::CompressOptions& compress = options.compress;
  if (!compress.on()) return 0;
  const uint64_t values =
      compress::values_per_block(compress::density_max(compress), base::kBlockElements);
  return compress::CompressedWriter::bytes_max(base::kBlockElements, values, compress.values, 0) -
         sizeof(compress::CompressedHeader);
}

}  // namespace

std::vector<compress::MatrixLayout> matrices_of_second_moment(const UpdaterOptions& options,
                                                              const plan::ParameterSpace& space) {
  const bool sent = options.compress.on() &&
                    kernels::takes_factored_second_moment(options.rule.rule) &&
                    options.compress.error_feedback;
  return sent ? compress::matrix_layouts(space) : std::vector<compress::MatrixLayout>();
}

uint64_t gradient_bytes(const UpdaterOptions& options, const plan::ParameterSpace& space) {
  if (const uint64_t block = compressed_block_bytes(options); block > 0) {
    const auto matrices = matrices_of_second_moment(options, space);
    uint64_t factors = 0;
    for (const plan::Subgroup& subgroup :
         space.subgroups(options.subgroup_elements != 0 ? options.subgroup_elements
                                                        : plan::kSubgroupElementsMax)) {
      factors += compress::factors_bytes(matrices, subgroup.first, subgroup.count);
    }
    return base::divide_up(space.count(), base::kBlockElements) * block + factors;
  }
  return space.count() * base::data_type_bytes(options.gradient_type);
}

base::Result<std::vector<uint64_t>> share_spool(uint64_t spool_bytes,
                                                const DeviceSources& sources) {
  std::map<uint32_t, double> rank_bandwidths;
  std::vector<double> bandwidths(sources.size(), 1);
  for (size_t d = 0; d < sources.size(); ++d) {
    if (spool_bytes > 0 && sources.size() > 1) {
      SI_ASSIGN_OR_RETURN(bandwidths[d], sources[d]->bandwidth());
    }
    rank_bandwidths[sources[d]->rank()] += bandwidths[d];
  }
  const double of_rank =
      static_cast<double>(spool_bytes) / static_cast<double>(rank_bandwidths.size());
  std::vector<uint64_t> shares;
  for (size_t d = 0; d < sources.size(); ++d) {
    const double share = of_rank * bandwidths[d] / rank_bandwidths[sources[d]->rank()];
    shares.push_back(base::round_up(static_cast<uint64_t>(std::ceil(share)), base::kIoAlignment));
  }
  return shares;
}

DeviceShare device_share(const UpdaterOptions& options, const plan::ParameterSpace& space,
                         uint64_t slot_memory_bytes, uint64_t device_elements) {
  DeviceShare share;
  share.slot_memory_bytes = slot_memory_bytes;
  share.weight_read_slots = options.stream_weights ? plan::kWeightReadSlots : 0;
  share.compressed_block_bytes = compressed_block_bytes(options);
  // In proportion to what the device holds, so that all of them spill alike.
  const double part = static_cast<double>(device_elements) / static_cast<double>(space.count());
  const bool fits = gradient_bytes(options, space) <= options.gradient_budget_bytes;
  share.gradient_memory_bytes =
      fits ? ~uint64_t{0}
           : static_cast<uint64_t>(part * static_cast<double>(options.gradient_budget_bytes));
  if (!options.tables.empty()) {
    share.row_memory_bytes = options.table_memory_bytes / options.devices.size();
  }
  share.groups = space.spans(0, space.count());
  share.matrices = matrices_of_second_moment(options, space);
  return share;
}

}  // namespace smartinf::engine

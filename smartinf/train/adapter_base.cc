#include "smartinf/train/adapter_base.h"

namespace smartinf::train {

using base::Result;
using base::Status;

Status check_adapter_base(const Position& there, const model::WeightFiles& files, uint64_t digest) {
  bool same = there.base == 0 || there.base == digest;
  if (there.base == 0 && there.base_ends != 0) {  // of a version that read no more
    SI_ASSIGN_OR_RETURN(const uint64_t ends, files.digest_of_ends());
    same = ends == there.base_ends;
  }
  if (same) return Status();
  return Status(base::ErrorCode::kMismatch,
                "model.from: the weights are not those that the adapters were trained beside",
                "Put the model back there that the run was started from, unchanged, or start "
                "another run from this one (train.run)",
                base::ErrorPlace{files.folder(), {}, {}, 0});
}

Result<model::WeightFiles> open_adapter_base(
    const std::string& folder, const model::Architecture& architecture,
    const std::string& client_metadata, const std::function<Status(uint64_t, uint64_t)>& progress) {
  SI_ASSIGN_OR_RETURN(const Position there, Position::from_json(client_metadata));
  SI_ASSIGN_OR_RETURN(model::WeightFiles files, model::WeightFiles::open(folder, architecture));
  SI_ASSIGN_OR_RETURN(const uint64_t digest, files.digest(progress));
  SI_RETURN_IF_ERROR(check_adapter_base(there, files, digest));
  return files;
}

}  // namespace smartinf::train

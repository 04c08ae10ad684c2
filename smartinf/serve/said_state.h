// State that a server tells is as little believed as a file: the engine computes with it.
#pragma once

#include "smartinf/base/status.h"
#include "smartinf/storage/store.h"

namespace smartinf::serve::wire {

/// Errors: kCorrupt, there is no such state.
base::Status check_said(const storage::StoreState& state);
/// Likewise; or it is not that of the layout's device.
base::Status check_said(const storage::StoreState& state, const storage::StoreLayout& layout);

/// Whether both are of one device of one run; layouts: with the same subgroups and planes, too.
bool same_device(const storage::StoreState& a, const storage::StoreState& b);
bool same_layout(const storage::StoreLayout& a, const storage::StoreLayout& b);

}  // namespace smartinf::serve::wire

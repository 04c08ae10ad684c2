// Snapshots and new states of devices that keep their state in a store (storage/store.h).
#pragma once

#include <memory>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/storage/state_reader.h"

namespace smartinf::csd {

/// Snapshot of what the reader has opened. name: of the device.
std::unique_ptr<Snapshot> make_snapshot(std::unique_ptr<storage::StateReader> reader,
                                        std::string name);

/// A new state in a store that was created for it. How it takes its place, and how it is deleted,
/// is for the kind of device to say.
class StoreNewState : public NewState {
 public:
  ~StoreNewState() override;

  const storage::StoreLayout& layout() const override { return store_->layout(); }
  void start(SubgroupWrite& write) override;
  base::Status wait(SubgroupWrite& write) override;
  base::Status prepare(const std::string& client_metadata) override;
  base::Status commit() override;
  base::Status close() override;

 protected:
  /// Begins the step that is copied.
  explicit StoreNewState(std::unique_ptr<storage::Store> store);

 private:
  std::unique_ptr<storage::Store> store_;  // null: closed, as closed_ says
  base::Status closed_;
};

}  // namespace smartinf::csd

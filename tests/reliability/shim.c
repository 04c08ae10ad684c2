/* Stands between a process and the C library (LD_PRELOAD): makes one chosen call on a file below
 * RELIABILITY_ROOT go wrong, or records what happens to the files there, for power cuts. shim.py builds
 * it, sets its environment and reads what it writes.
 *
 *   RELIABILITY_ROOT    calls on other files are left alone and not counted
 *   RELIABILITY_NAME    likewise, on files whose names begin otherwise
 *   RELIABILITY_FAULT   "CALL KIND NTH SEED": the NTH call of CALL ("any": of all) fails by KIND; an
 *                       NTH below 0: that one and all that follow
 *   RELIABILITY_FIRED   file that is made when the fault has happened
 *   RELIABILITY_COUNT   file that gets the number of calls at the end, a line for each CALL
 *   RELIABILITY_RECORD  file that gets every write, sync and change of names, in order
 *
 * io_uring would go past all of this: its set-up is refused, so that smartinf takes threads.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum Call {
  kAny, kOpen, kPread, kPwrite, kWrite, kFdatasync, kFsync, kFallocate, kTruncate, kRename, kMkdir,
  kUnlink, kFlock, kCalls
};
static const char* const kNames[kCalls] = {"any",      "open",      "preadv2", "pwritev2", "write",
                                           "fdatasync", "fsync",    "fallocate", "ftruncate",
                                           "rename",   "mkdir",     "unlink",  "flock"};

/* What is recorded; shim.py knows the same numbers. */
enum Record { kCreated = 1, kData, kSize, kSync, kMadeFolder, kRenamed, kRemoved, kExchanged };
struct RecordHeader {
  uint32_t kind, durable;  /* of data: written with RWF_DSYNC or O_DSYNC */
  uint64_t inode, offset, length;
  uint32_t path, target;   /* bytes of each behind the header; then the data */
};

static char root[PATH_MAX];
static const char* name_begin;
static size_t root_length;
static enum Call fault_call = kCalls;
static char fault_kind[16];
static long fault_nth;
static unsigned fault_seed;
static const char* fired_path;
static const char* count_path;
static int record = -1;
static pid_t owner;
static long counts[kCalls];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void refuse_io_uring(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof(code) / sizeof(code[0]), code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    dprintf(2, "shim: io_uring cannot be refused: %s\n", strerror(errno));
    _exit(99);
  }
}

__attribute__((constructor)) static void begin(void) {
  const char* text = getenv("RELIABILITY_ROOT");
  if (text == NULL || realpath(text, root) == NULL) return;
  root_length = strlen(root);
  name_begin = getenv("RELIABILITY_NAME");
  owner = getpid();
  fired_path = getenv("RELIABILITY_FIRED");
  count_path = getenv("RELIABILITY_COUNT");
  text = getenv("RELIABILITY_FAULT");
  if (text != NULL) {
    char call[16];
    if (sscanf(text, "%15s %15s %ld %u", call, fault_kind, &fault_nth, &fault_seed) == 4) {
      for (int i = 0; i < kCalls; ++i) {
        if (strcmp(call, kNames[i]) == 0) fault_call = (enum Call)i;
      }
    }
    if (fault_call == kCalls) {
      dprintf(2, "shim: RELIABILITY_FAULT cannot be read: %s\n", text);
      _exit(99);
    }
  }
  text = getenv("RELIABILITY_RECORD");
  if (text != NULL) {
    record = (int)syscall(SYS_openat, AT_FDCWD, text, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
  }
  refuse_io_uring();
}

__attribute__((destructor)) static void finish(void) {
  if (count_path == NULL || getpid() != owner) return;
  int file = (int)syscall(SYS_openat, AT_FDCWD, count_path, O_CREAT | O_WRONLY | O_TRUNC, 0644);
  for (int i = 0; i < kCalls; ++i) dprintf(file, "%s %ld\n", kNames[i], counts[i]);
  syscall(SYS_close, file);
}

static int is_chosen(const char* whole) {
  if (strncmp(whole, root, root_length) != 0) return 0;
  if (whole[root_length] != '/' && whole[root_length] != 0) return 0;
  return name_begin == NULL || strncmp(strrchr(whole, '/') + 1, name_begin, strlen(name_begin)) == 0;
}

/* An absolute path without links in its folder part; 0 where it is not below the root. */
static int below(int folder, const char* path, char* whole) {
  char joined[PATH_MAX];
  if (root_length == 0 || path == NULL) return 0;
  if (path[0] == '/') {
    if (strlen(path) >= sizeof(joined)) return 0;
    strcpy(joined, path);
  } else {
    char base[PATH_MAX], link[64];
    if (folder == AT_FDCWD) {
      strcpy(link, "/proc/self/cwd");
    } else {
      snprintf(link, sizeof(link), "/proc/self/fd/%d", folder);
    }
    const ssize_t length = readlink(link, base, sizeof(base) - 1);
    if (length < 0) return 0;
    base[length] = 0;
    if ((size_t)snprintf(joined, sizeof(joined), "%s/%s", base, path) >= sizeof(joined)) return 0;
  }
  size_t end = strlen(joined);
  while (end > 1 && joined[end - 1] == '/') joined[--end] = 0;
  char* slash = strrchr(joined, '/');
  char name[NAME_MAX + 1], resolved[PATH_MAX];
  if (slash == NULL || strlen(slash + 1) > NAME_MAX) return 0;
  strcpy(name, slash + 1);
  *slash = 0;
  if (realpath(joined[0] ? joined : "/", resolved) == NULL) return 0;
  if ((size_t)snprintf(whole, PATH_MAX, "%s/%s", resolved, name) >= PATH_MAX) return 0;
  return is_chosen(whole);
}

static int below_file(int file, char* whole) {
  char link[64];
  if (root_length == 0) return 0;
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, whole, PATH_MAX - 1);
  if (length < 0) return 0;
  whole[length] = 0;
  return is_chosen(whole);
}

static int is(const char* kind) { return strcmp(fault_kind, kind) == 0; }

/* Counts the call; 1 if it is the one to go wrong. Kinds that need nothing else happen here. */
static int turn(enum Call call) {
  if (getpid() != owner) return 0;
  const long all = __atomic_add_fetch(&counts[kAny], 1, __ATOMIC_SEQ_CST);
  const long ours = __atomic_add_fetch(&counts[call], 1, __ATOMIC_SEQ_CST);
  if (fault_call != call && fault_call != kAny) return 0;
  const long at = fault_call == kAny ? all : ours;
  if (fault_nth >= 0 ? at != fault_nth : at < -fault_nth) return 0;
  if (fired_path != NULL) {
    syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, fired_path, O_CREAT | O_WRONLY, 0644));
  }
  if (is("kill")) raise(SIGKILL);
  if (is("stop")) {
    kill(owner, SIGSTOP);
    return 0;
  }
  if (is("interrupt")) {
    kill(owner, SIGINT);
    return 0;
  }
  return 1;
}

/* The errno that the fault's kind names; 0 for kinds of another sort. */
static int fault_errno(void) {
  static const struct { const char* name; int number; } kErrors[] = {
      {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EINTR", EINTR},   {"EAGAIN", EAGAIN},
      {"EROFS", EROFS},   {"EINVAL", EINVAL}, {"ENODEV", ENODEV}, {"EACCES", EACCES},
      {"ENOLCK", ENOLCK}, {"EFBIG", EFBIG},   {"EDQUOT", EDQUOT}};
  for (size_t i = 0; i < sizeof(kErrors) / sizeof(kErrors[0]); ++i) {
    if (is(kErrors[i].name)) return kErrors[i].number;
  }
  return 0;
}

/* 1 where the call is to fail with errno, which is set. */
static int fails(enum Call call) {
  if (!turn(call)) return 0;
  errno = fault_errno();
  return errno != 0;
}

static void note(enum Record kind, int durable, uint64_t inode, uint64_t offset, uint64_t length,
                 const char* path, const char* target, const struct iovec* data, int parts) {
  if (record < 0 || getpid() != owner) return;
  struct RecordHeader header = {kind, (uint32_t)durable, inode, offset, length,
                                path ? (uint32_t)strlen(path) : 0,
                                target ? (uint32_t)strlen(target) : 0};
  pthread_mutex_lock(&mutex);
  struct iovec all[3] = {{&header, sizeof(header)},
                         {(void*)(path ? path : ""), header.path},
                         {(void*)(target ? target : ""), header.target}};
  int wrong = syscall(SYS_writev, record, all, 3) < 0;
  for (int i = 0; i < parts && length > 0; ++i) {
    size_t part = data[i].iov_len < length ? data[i].iov_len : length;
    for (size_t done = 0; done < part;) {
      const long written = syscall(SYS_write, record, (char*)data[i].iov_base + done, part - done);
      if (written <= 0) {
        wrong = 1;
        break;
      }
      done += (size_t)written;
    }
    length -= part;
  }
  pthread_mutex_unlock(&mutex);
  if (wrong) {
    dprintf(2, "shim: cannot record: %s\n", strerror(errno));
    _exit(99);
  }
}

static uint64_t inode_of(int file) {
  struct stat info;
  return fstat(file, &info) == 0 ? info.st_ino : 0;
}

static void note_size(int file) {
  struct stat info;
  if (record >= 0 && fstat(file, &info) == 0) {
    note(kSize, 0, info.st_ino, (uint64_t)info.st_size, 0, NULL, NULL, NULL, 0);
  }
}

/* --- opening ------------------------------------------------------------------------------------ */

static int open_any(int folder, const char* path, int flags, mode_t mode) {
  char whole[PATH_MAX];
  const int ours = below(folder, path, whole);
  if (ours && fails(kOpen)) return -1;
  struct stat info;
  const int was = !ours || record < 0 || fstatat(folder, path, &info, 0) == 0;
  const int file = (int)syscall(SYS_openat, folder, path, flags, mode);
  if (file >= 0 && ours && record >= 0) {
    if (!was) note(kCreated, 0, inode_of(file), 0, 0, whole, NULL, NULL, 0);
    if (was && (flags & O_TRUNC)) note_size(file);
  }
  return file;
}

#define OPEN_MODE(last)                                     \
  mode_t mode = 0;                                          \
  if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {                      \
    va_list rest;                                           \
    va_start(rest, last);                                   \
    mode = va_arg(rest, mode_t);                            \
    va_end(rest);                                           \
  }
int open(const char* path, int flags, ...) { OPEN_MODE(flags) return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char* path, int flags, ...) {
  OPEN_MODE(flags) return open_any(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  OPEN_MODE(flags) return open_any(folder, path, flags, mode);
}
int openat64(int folder, const char* path, int flags, ...) {
  OPEN_MODE(flags) return open_any(folder, path, flags | O_LARGEFILE, mode);
}

/* std::ofstream opens by this, and writes by write() and writev(). */
FILE* fopen64(const char* path, const char* mode) {
  char whole[PATH_MAX];
  const int ours = below(AT_FDCWD, path, whole);
  if (ours && fails(kOpen)) return NULL;
  struct stat info;
  const int was = !ours || record < 0 || stat(path, &info) == 0;
  FILE* (*real)(const char*, const char*) = (FILE * (*)(const char*, const char*)) dlsym(RTLD_NEXT, "fopen64");
  FILE* file = real(path, mode);
  if (file != NULL && ours && record >= 0) {
    if (!was) note(kCreated, 0, inode_of(fileno(file)), 0, 0, whole, NULL, NULL, 0);
    if (was && mode[0] == 'w') note_size(fileno(file));
  }
  return file;
}
FILE* fopen(const char* path, const char* mode) { return fopen64(path, mode); }

/* --- data --------------------------------------------------------------------------------------- */

static size_t total(const struct iovec* parts, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
  return bytes;
}

static ssize_t raw_write(int file, const struct iovec* parts, int count, off_t offset, int flags) {
  if (offset < 0) return syscall(SYS_writev, file, parts, count);
  return syscall(SYS_pwritev2, file, parts, count, offset, (long)0, flags);
}

/* A copy of all parts in one piece that direct I/O takes; the caller frees `bytes`. */
static struct iovec joined(const struct iovec* parts, int count, void** bytes) {
  const size_t length = total(parts, count);
  if (posix_memalign(bytes, 4096, length + 4096) != 0) abort();
  for (size_t i = 0, at = 0; i < (size_t)count; at += parts[i++].iov_len) {
    memcpy((char*)*bytes + at, parts[i].iov_base, parts[i].iov_len);
  }
  struct iovec whole = {*bytes, length};
  return whole;
}

/* Writes that tell their caller something else than what they did. */
static ssize_t faulty_write(int file, const struct iovec* parts, int count, off_t offset, int flags) {
  const size_t length = total(parts, count);
  if (is("zero")) return 0;
  if (is("dropped")) {
    if (offset < 0) lseek(file, (off_t)length, SEEK_CUR);
    return (ssize_t)length;
  }
  void* bytes;
  struct iovec part = joined(parts, count, &bytes);
  ssize_t outcome = (ssize_t)length;
  const size_t unit = length >= 8192 ? 4096 : 1;
  if (is("short")) {
    part.iov_len = length / 2 / unit * unit;
    outcome = part.iov_len ? raw_write(file, &part, 1, offset, flags)
                           : raw_write(file, parts, count, offset, flags);
  } else if (is("unaligned")) {
    outcome = raw_write(file, &part, 1, offset, flags);
    if (outcome > 1) outcome = (outcome / 2) | 1;
    if (offset < 0) lseek(file, outcome - (ssize_t)length, SEEK_CUR);
  } else if (is("torn")) {
    part.iov_len = length / 2 / unit * unit;
    if (part.iov_len) raw_write(file, &part, 1, offset, flags);
    if (offset < 0) lseek(file, (off_t)(length - part.iov_len), SEEK_CUR);
  } else if (is("misdirected")) {
    struct stat info;
    off_t other = offset < 0 ? lseek(file, 0, SEEK_CUR) : offset;
    if (fstat(file, &info) == 0 && info.st_size > (off_t)length) {
      other = (off_t)(fault_seed % (unsigned)((info.st_size - (off_t)length) / 4096 + 1)) * 4096;
    }
    raw_write(file, &part, 1, other, flags);
    if (offset < 0) lseek(file, (off_t)length, SEEK_CUR);
  } else if (is("flipped")) {
    const size_t bit = fault_seed % (length * 8);
    ((unsigned char*)bytes)[bit / 8] ^= (unsigned char)(1u << bit % 8);
    outcome = raw_write(file, &part, 1, offset, flags);
  } else {
    outcome = raw_write(file, parts, count, offset, flags);
  }
  const int kept = errno;
  free(bytes);
  errno = kept;
  return outcome;
}

static ssize_t write_any(enum Call call, int file, const struct iovec* parts, int count, off_t offset,
                         int flags) {
  char whole[PATH_MAX];
  if (!below_file(file, whole)) return raw_write(file, parts, count, offset, flags);
  ssize_t written;
  if (total(parts, count) > 0 && turn(call)) {
    errno = fault_errno();
    if (errno != 0) return -1;
    written = faulty_write(file, parts, count, offset, flags);
  } else {
    written = raw_write(file, parts, count, offset, flags);
  }
  if (written > 0 && record >= 0) {
    const int kept = errno;
    const off_t at = offset < 0 ? lseek(file, 0, SEEK_CUR) - written : offset;
    const int durable = (flags & RWF_DSYNC) != 0 || (fcntl(file, F_GETFL) & O_DSYNC) != 0;
    note(kData, durable, inode_of(file), (uint64_t)at, (uint64_t)written, NULL, NULL, parts, count);
    errno = kept;
  }
  return written;
}

ssize_t write(int file, const void* data, size_t length) {
  struct iovec part = {(void*)data, length};
  return write_any(kWrite, file, &part, 1, -1, 0);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  return write_any(kWrite, file, parts, count, -1, 0);
}
ssize_t pwrite(int file, const void* data, size_t length, off_t offset) {
  struct iovec part = {(void*)data, length};
  return write_any(kPwrite, file, &part, 1, offset, 0);
}
ssize_t pwrite64(int file, const void* data, size_t length, off64_t offset) {
  return pwrite(file, data, length, offset);
}
ssize_t pwritev(int file, const struct iovec* parts, int count, off_t offset) {
  return write_any(kPwrite, file, parts, count, offset, 0);
}
ssize_t pwritev2(int file, const struct iovec* parts, int count, off_t offset, int flags) {
  return write_any(kPwrite, file, parts, count, offset, flags);
}
ssize_t pwritev64v2(int file, const struct iovec* parts, int count, off64_t offset, int flags) {
  return write_any(kPwrite, file, parts, count, offset, flags);
}

static ssize_t read_any(int file, const struct iovec* parts, int count, off_t offset, int flags) {
  char whole[PATH_MAX];
  if (!below_file(file, whole) || total(parts, count) == 0 || !turn(kPread)) {
    return syscall(SYS_preadv2, file, parts, count, offset, (long)0, flags);
  }
  errno = fault_errno();
  if (errno != 0) return -1;
  if (is("zero")) return 0;
  ssize_t outcome = syscall(SYS_preadv2, file, parts, count, offset, (long)0, flags);
  if (outcome <= 1) return outcome;
  if (is("short")) return outcome >= 8192 ? outcome / 2 / 4096 * 4096 : outcome;
  if (is("unaligned")) return (outcome / 2) | 1;
  if (is("flipped") && parts[0].iov_len > 0) {
    const size_t in = (size_t)outcome < parts[0].iov_len ? (size_t)outcome : parts[0].iov_len;
    const size_t bit = fault_seed % (in * 8);
    ((unsigned char*)parts[0].iov_base)[bit / 8] ^= (unsigned char)(1u << bit % 8);
  }
  return outcome;
}
ssize_t pread(int file, void* data, size_t length, off_t offset) {
  struct iovec part = {data, length};
  return read_any(file, &part, 1, offset, 0);
}
ssize_t pread64(int file, void* data, size_t length, off64_t offset) {
  return pread(file, data, length, offset);
}
ssize_t preadv2(int file, const struct iovec* parts, int count, off_t offset, int flags) {
  return read_any(file, parts, count, offset, flags);
}
ssize_t preadv64v2(int file, const struct iovec* parts, int count, off64_t offset, int flags) {
  return read_any(file, parts, count, offset, flags);
}

/* --- syncs, sizes ------------------------------------------------------------------------------- */

/* Noted before it begins: only what was written before then is sure to be on the medium after it. */
static int sync_any(enum Call call, int file, long number) {
  char whole[PATH_MAX];
  if (below_file(file, whole)) {
    if (turn(call)) {
      errno = fault_errno();
      if (errno != 0) return -1;
      if (is("dropped")) return 0;
    }
    struct stat info;
    if (record >= 0 && fstat(file, &info) == 0) {
      note(kSync, 0, info.st_ino, S_ISDIR(info.st_mode), 0, whole, NULL, NULL, 0);
    }
  }
  return (int)syscall(number, file);
}
int fsync(int file) { return sync_any(kFsync, file, SYS_fsync); }
int fdatasync(int file) { return sync_any(kFdatasync, file, SYS_fdatasync); }

int fallocate(int file, int mode, off_t offset, off_t length) {
  char whole[PATH_MAX];
  const int ours = below_file(file, whole);
  if (ours && fails(kFallocate)) return -1;
  const int outcome = (int)syscall(SYS_fallocate, file, mode, offset, length);
  if (ours && outcome == 0) note_size(file);
  return outcome;
}
int fallocate64(int file, int mode, off64_t offset, off64_t length) {
  return fallocate(file, mode, offset, length);
}
int ftruncate(int file, off_t length) {
  char whole[PATH_MAX];
  const int ours = below_file(file, whole);
  if (ours && fails(kTruncate)) return -1;
  const int outcome = (int)syscall(SYS_ftruncate, file, length);
  if (ours && outcome == 0) note_size(file);
  return outcome;
}
int ftruncate64(int file, off64_t length) { return ftruncate(file, length); }

/* Blocks that are shared or copied by the kernel would not be seen: copies are made by hand. */
int ioctl(int file, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  char whole[PATH_MAX];
  if (record >= 0 && (request == FICLONE || request == FICLONERANGE) &&
      below_file(file, whole)) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return (int)syscall(SYS_ioctl, file, request, argument);
}
ssize_t copy_file_range(int in, off64_t* in_at, int out, off64_t* out_at, size_t length,
                        unsigned flags) {
  if (record >= 0) {
    errno = ENOSYS;
    return -1;
  }
  return syscall(SYS_copy_file_range, in, in_at, out, out_at, length, flags);
}

/* --- names -------------------------------------------------------------------------------------- */

static int rename_any(int from_folder, const char* from, int to_folder, const char* to,
                      unsigned flags) {
  char source[PATH_MAX], target[PATH_MAX];
  const int ours = below(from_folder, from, source) && below(to_folder, to, target);
  if (ours && fails(kRename)) return -1;
  const int outcome = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
  if (ours && outcome == 0) {
    note(flags & RENAME_EXCHANGE ? kExchanged : kRenamed, 0, 0, 0, 0, source, target, NULL, 0);
  }
  return outcome;
}
int rename(const char* from, const char* to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  return rename_any(from_folder, from, to_folder, to, 0);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return rename_any(from_folder, from, to_folder, to, flags);
}

static int mkdir_any(int folder, const char* path, mode_t mode) {
  char whole[PATH_MAX];
  const int ours = below(folder, path, whole);
  if (ours && fails(kMkdir)) return -1;
  const int outcome = (int)syscall(SYS_mkdirat, folder, path, mode);
  if (ours && outcome == 0) note(kMadeFolder, 0, 0, 0, 0, whole, NULL, NULL, 0);
  return outcome;
}
int mkdir(const char* path, mode_t mode) { return mkdir_any(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char* path, mode_t mode) { return mkdir_any(folder, path, mode); }

static int unlink_any(int folder, const char* path, int flags) {
  char whole[PATH_MAX];
  const int ours = below(folder, path, whole);
  if (ours && fails(kUnlink)) return -1;
  const int outcome = (int)syscall(SYS_unlinkat, folder, path, flags);
  if (ours && outcome == 0) note(kRemoved, 0, 0, 0, 0, whole, NULL, NULL, 0);
  return outcome;
}
int unlink(const char* path) { return unlink_any(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char* path, int flags) { return unlink_any(folder, path, flags); }
int rmdir(const char* path) { return unlink_any(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  const int outcome = unlink_any(AT_FDCWD, path, 0);
  return outcome != 0 && errno == EISDIR ? unlink_any(AT_FDCWD, path, AT_REMOVEDIR) : outcome;
}

int flock(int file, int operation) {
  char whole[PATH_MAX];
  if (below_file(file, whole) && fails(kFlock)) return -1;
  return (int)syscall(SYS_flock, file, operation);
}

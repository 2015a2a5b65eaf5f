// Notes every change that a process makes to files below one directory, so that a test can build what a power cut
// would have left; and lets that disk stand still or be full. For tests only, loaded with LD_PRELOAD.
//
//   RECORDER_DIR    absolute path of the directory
//   RECORDER_LOG    file that gets the log; without it nothing is noted
//   RECORDER_STALL  while this file exists, syncs and synchronous writes wait; who waits makes a file of this name with
//                   .waiting behind it
//   RECORDER_FULL   while this file exists, writes and syncs fail with ENOSPC
//
// A record is a struct record, the path and the data. Times are those of CLOCK_MONOTONIC: before the operation and
// after it. Records are in the order of their ends; a write and its record are one step, a sync is not.
// Not seen: writes through mappings, dup'ed descriptors, io_uring, and processes that are started by this one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR };
enum { FLAG_DSYNC = 1, FLAG_EMPTIED = 2 };

struct record {
  uint64_t begin, end;
  uint64_t inode;
  int64_t offset;
  uint64_t data_len;
  uint32_t path_len;
  uint16_t kind, flags;
};

#define FDS 65536
// What is known of a descriptor: 0 is not ours.
static struct { uint64_t inode; uint16_t flags; uint8_t ours, append; } fds[FDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char dir[PATH_MAX];
static size_t dir_len;
static const char *stall_path, *full_path;
static int log_fd = -1;

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

__attribute__((constructor)) static void start(void) {
  const char *wanted = getenv("RECORDER_DIR"), *log = getenv("RECORDER_LOG");
  if (wanted && realpath(wanted, dir)) dir_len = strlen(dir);
  stall_path = getenv("RECORDER_STALL");
  full_path = getenv("RECORDER_FULL");
  if (log) log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  // Its children are not recorded: their descriptors are not known here.
  unsetenv("LD_PRELOAD");
}

static int exists(const char *path) {
  return path && syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

static int full(void) {
  if (!exists(full_path)) return 0;
  errno = ENOSPC;
  return 1;
}

static void stall(void) {
  struct timespec pause = {0, 2000000};
  if (exists(stall_path)) {
    char waiting[PATH_MAX];
    snprintf(waiting, sizeof waiting, "%s.waiting", stall_path);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, waiting, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) syscall(SYS_close, fd);
  }
  while (exists(stall_path)) nanosleep(&pause, NULL);
}

static int below(const char *path) {
  return dir_len && strncmp(path, dir, dir_len) == 0 && (path[dir_len] == '/' || !path[dir_len]);
}

static void put(const void *data, size_t len) {
  const char *at = data;
  while (len) {
    ssize_t n = syscall(SYS_write, log_fd, at, len);
    if (n <= 0) { static const char text[] = "recorder: cannot write the log\n";
      (void)!syscall(SYS_write, 2, text, sizeof text - 1); _exit(99); }
    at += n;
    len -= (size_t)n;
  }
}

// Under the lock, but for a sync, whose begin is taken by the caller.
static void note(uint16_t kind, uint64_t begin, uint64_t inode, int64_t offset, uint16_t flags, const char *path,
                 const struct iovec *data, int count, size_t len) {
  if (log_fd < 0) return;
  struct record r = {begin, now(), inode, offset, len, path ? (uint32_t)strlen(path) : 0, kind, flags};
  put(&r, sizeof r);
  if (path) put(path, r.path_len);
  for (int i = 0; i < count && len; i++) {
    size_t part = data[i].iov_len < len ? data[i].iov_len : len;
    put(data[i].iov_base, part);
    len -= part;
  }
}

static int ours(int fd) { return fd >= 0 && fd < FDS && fds[fd].ours; }

// The absolute name of a path, whose last part need not exist.
static int absolute(int at, const char *path, char *out) {
  char real[PATH_MAX], parent[PATH_MAX];
  if (path[0] != '/' && at != AT_FDCWD) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t n = readlink(link, real, sizeof real - 1);
    if (n <= 0) return 0;
    real[n] = 0;
    if ((size_t)snprintf(parent, sizeof parent, "%s/%s", real, path) >= sizeof parent) return 0;
  } else if ((size_t)snprintf(parent, sizeof parent, "%s", path) >= sizeof parent) {
    return 0;
  }
  size_t len = strlen(parent);
  while (len > 1 && parent[len - 1] == '/') parent[--len] = 0;
  char *slash = strrchr(parent, '/');
  const char *name = slash ? slash + 1 : parent;
  if (slash) *slash = 0;
  if (!realpath(slash ? (slash == parent ? "/" : parent) : ".", real)) return 0;
  return (size_t)snprintf(out, PATH_MAX, "%s/%s", real, name) < PATH_MAX;
}

static int open_at(int at, const char *path, int flags, mode_t mode) {
  uint64_t begin = now();
  int writes = (flags & O_ACCMODE) != O_RDONLY;
  char name[PATH_MAX];
  if (!writes || (flags & O_TMPFILE) == O_TMPFILE || !absolute(at, path, name) || !below(name)) {
    int fd = (int)syscall(SYS_openat, at, path, flags, mode);
    if (fd >= 0 && fd < FDS) fds[fd].ours = 0;
    return fd;
  }
  if ((flags & (O_CREAT | O_TRUNC)) && full()) return -1;
  pthread_mutex_lock(&lock);
  int fd = (int)syscall(SYS_openat, at, path, flags, mode);
  int error = errno;
  if (fd >= 0 && fd < FDS) {
    struct stat st;
    fstat(fd, &st);
    fds[fd].ours = S_ISREG(st.st_mode);
    fds[fd].append = (flags & O_APPEND) != 0;
    fds[fd].inode = st.st_ino;
    // O_SYNC has the bit of O_DSYNC set.
    fds[fd].flags = (flags & O_DSYNC) ? FLAG_DSYNC : 0;
    if (fds[fd].ours)
      note(OPEN, begin, st.st_ino, 0, (flags & O_TRUNC) ? FLAG_EMPTIED : 0, name, NULL, 0, 0);
  }
  pthread_mutex_unlock(&lock);
  errno = error;
  return fd;
}

#define MODE(flags, last) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, last); mode = va_arg(list, mode_t); va_end(list); }

int open(const char *path, int flags, ...) { MODE(flags, flags) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, flags) return open_at(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, flags) return open_at(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, flags) return open_at(at, path, flags, mode); }

int close(int fd) {
  if (fd >= 0 && fd < FDS) fds[fd].ours = 0;
  return (int)syscall(SYS_close, fd);
}

// One write of ours; `offset` below 0 is where the descriptor stands.
static ssize_t write_ours(int fd, const struct iovec *data, int count, off_t offset) {
  if (full()) return -1;
  uint64_t begin = now();
  if (fds[fd].flags & FLAG_DSYNC) stall();
  pthread_mutex_lock(&lock);
  off_t at = offset;
  if (at < 0) {
    struct stat st;
    at = fds[fd].append && fstat(fd, &st) == 0 ? st.st_size : lseek(fd, 0, SEEK_CUR);
  }
  ssize_t n = offset < 0 ? syscall(SYS_writev, fd, data, count)
                         : syscall(SYS_pwritev, fd, data, count, (long)offset, 0L);
  int error = errno;
  if (n > 0) note(WRITE, begin, fds[fd].inode, at, fds[fd].flags, NULL, data, count, (size_t)n);
  pthread_mutex_unlock(&lock);
  errno = error;
  return n;
}

ssize_t write(int fd, const void *data, size_t len) {
  if (!ours(fd)) return syscall(SYS_write, fd, data, len);
  struct iovec part = {(void *)data, len};
  return write_ours(fd, &part, 1, -1);
}

ssize_t writev(int fd, const struct iovec *data, int count) {
  if (!ours(fd)) return syscall(SYS_writev, fd, data, count);
  return write_ours(fd, data, count, -1);
}

ssize_t pwrite(int fd, const void *data, size_t len, off_t offset) {
  if (!ours(fd)) return syscall(SYS_pwrite64, fd, data, len, offset);
  struct iovec part = {(void *)data, len};
  return write_ours(fd, &part, 1, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t len, off_t offset) { return pwrite(fd, data, len, offset); }

ssize_t pwritev(int fd, const struct iovec *data, int count, off_t offset) {
  if (!ours(fd)) return syscall(SYS_pwritev, fd, data, count, (long)offset, 0L);
  return write_ours(fd, data, count, offset);
}

ssize_t pwritev64(int fd, const struct iovec *data, int count, off_t offset) {
  return pwritev(fd, data, count, offset);
}

int ftruncate(int fd, off_t len) {
  if (!ours(fd)) return (int)syscall(SYS_ftruncate, fd, len);
  if (full()) return -1;
  uint64_t begin = now();
  pthread_mutex_lock(&lock);
  int result = (int)syscall(SYS_ftruncate, fd, len);
  int error = errno;
  if (result == 0) note(TRUNCATE, begin, fds[fd].inode, len, 0, NULL, NULL, 0, 0);
  pthread_mutex_unlock(&lock);
  errno = error;
  return result;
}

int ftruncate64(int fd, off_t len) { return ftruncate(fd, len); }

static int sync_fd(int fd, long call) {
  if (!ours(fd)) return (int)syscall(call, fd);
  if (full()) return -1;
  stall();
  // What was written before this moment is on the disk after it; later writes may be or not.
  uint64_t begin = now();
  int result = (int)syscall(call, fd);
  int error = errno;
  if (result == 0) {
    pthread_mutex_lock(&lock);
    note(SYNC, begin, fds[fd].inode, 0, 0, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
  }
  errno = error;
  return result;
}

int fsync(int fd) { return sync_fd(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_fd(fd, SYS_fdatasync); }

static void note_names(uint16_t kind, uint64_t begin, const char *from, const char *to) {
  struct iovec part = {(void *)to, to ? strlen(to) : 0};
  pthread_mutex_lock(&lock);
  note(kind, begin, 0, 0, 0, from, &part, to ? 1 : 0, part.iov_len);
  pthread_mutex_unlock(&lock);
}

static int rename_at(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
  uint64_t begin = now();
  char a[PATH_MAX], b[PATH_MAX];
  int noted = absolute(from_at, from, a) && absolute(to_at, to, b) && below(a) && below(b);
  int result = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
  int error = errno;
  if (result == 0 && noted) note_names(RENAME, begin, a, b);
  errno = error;
  return result;
}

int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_at(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned f) { return rename_at(a, from, b, to, f); }

int unlinkat(int at, const char *path, int flags) {
  uint64_t begin = now();
  char name[PATH_MAX];
  int noted = absolute(at, path, name) && below(name);
  int result = (int)syscall(SYS_unlinkat, at, path, flags);
  int error = errno;
  if (result == 0 && noted) note_names(UNLINK, begin, name, NULL);
  errno = error;
  return result;
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char *path, mode_t mode) {
  uint64_t begin = now();
  char name[PATH_MAX];
  int noted = absolute(at, path, name) && below(name);
  int result = (int)syscall(SYS_mkdirat, at, path, mode);
  int error = errno;
  if (result == 0 && noted) note_names(MKDIR, begin, name, NULL);
  errno = error;
  return result;
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

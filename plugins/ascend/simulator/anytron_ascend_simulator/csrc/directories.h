// The directories in shared memory through which the ranks of a communicator talk.
//
// Everybody may write to /dev/shm. So a directory has a random name, belongs to one user (0700), and is held by a shared
// lock as long as a rank uses it: a process's number would not do, other containers count their own. What crashed
// processes left is what nobody holds. Nothing here follows a link, and nothing of another user is touched.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace directories {

// Open and hold a directory; -1 if it is none, or if its cleaner was faster.
inline int hold(const std::string& path) {
  const int directory = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory < 0) return -1;
  struct stat held, there;
  if (flock(directory, LOCK_SH) == 0 && fstat(directory, &held) == 0 && lstat(path.c_str(), &there) == 0 &&
      held.st_ino == there.st_ino && held.st_uid == geteuid()) {
    return directory;
  }
  close(directory);
  return -1;
}

// Make a directory that nobody else can enter, and hold it; -1 if that cannot be done.
inline int make(const std::string& root, const std::string& prefix, std::string* path) {
  for (int tries = 0; tries < 10; ++tries) {
    std::string name = root + "/" + prefix + "XXXXXX";
    if (mkdtemp(&name[0]) == nullptr) return -1;
    const int directory = hold(name);
    if (directory >= 0) return *path = name, directory;
  }
  return -1;
}

// Remove the files in a directory, and the directory, if it is ours and nobody holds it.
inline void remove_unheld(int root, const char* name) {
  const int directory = openat(root, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory < 0) return;
  struct stat status;
  DIR* entries = nullptr;
  if (fstat(directory, &status) == 0 && status.st_uid == geteuid() && flock(directory, LOCK_EX | LOCK_NB) == 0 &&
      (entries = fdopendir(directory)) != nullptr) {
    while (const dirent* entry = readdir(entries)) {
      if (entry->d_name[0] != '.') unlinkat(directory, entry->d_name, 0);
    }
    unlinkat(root, name, AT_REMOVEDIR);
    closedir(entries);  // closes the directory as well
    return;
  }
  close(directory);
}

// Remove directories that nobody holds, such as those that crashed processes left.
inline void remove_leftovers(const std::string& root, const std::string& prefix) {
  DIR* all = opendir(root.c_str());
  if (all == nullptr) return;
  std::vector<std::string> names;
  while (const dirent* entry = readdir(all)) names.emplace_back(entry->d_name);
  for (const std::string& name : names) {
    if (name.rfind(prefix, 0) == 0) remove_unheld(dirfd(all), name.c_str());
  }
  closedir(all);
}

}  // namespace directories

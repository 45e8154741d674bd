"""Numbers of the system calls that are allowed or named, for each kind of processor.

They are from ``asm/unistd_64.h`` for x86_64, and from ``asm-generic/unistd.h`` for aarch64, which lacks some calls.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A kind of processor.

    Attributes:
        audit: The kernel's constant for it (``AUDIT_ARCH_*`` of ``linux/audit.h``).
        calls: Numbers of calls by their names.
        others: Numbers of some calls that are never allowed, so that messages can name them.
    """

    audit: int
    calls: dict[str, int]
    others: dict[str, int]


_X86_64 = (
    "access 21 alarm 37 arch_prctl 158 brk 12 capget 125 chdir 80 chmod 90 clock_getres 229 clock_gettime 228 "
    "clock_nanosleep 230 clone 56 close 3 close_range 436 copy_file_range 326 creat 85 dup 32 dup2 33 dup3 292 "
    "epoll_create 213 epoll_create1 291 epoll_ctl 233 epoll_pwait 281 epoll_pwait2 441 epoll_wait 232 eventfd 284 "
    "eventfd2 290 execve 59 exit 60 exit_group 231 faccessat 269 faccessat2 439 fadvise64 221 fchdir 81 fchmod 91 "
    "fchmodat 268 fchmodat2 452 fcntl 72 fdatasync 75 fgetxattr 193 flistxattr 196 fstat 5 fstatfs 138 fsync 74 "
    "ftruncate 77 futex 202 futex_requeue 456 futex_wait 455 futex_waitv 449 futex_wake 454 futimesat 261 "
    "get_mempolicy 239 get_robust_list 274 getcpu 309 getcwd 79 getdents 78 getdents64 217 getegid 108 geteuid 107 "
    "getgid 104 getgroups 115 getitimer 36 getpeername 52 getpgid 121 getpgrp 111 getpid 39 getppid 110 getpriority "
    "140 getrandom 318 getresgid 120 getresuid 118 getrlimit 97 getrusage 98 getsid 124 getsockname 51 getsockopt 55 "
    "gettid 186 gettimeofday 96 getuid 102 getxattr 191 ioctl 16 kill 62 lgetxattr 192 link 86 linkat 265 listxattr "
    "194 llistxattr 195 lseek 8 lstat 6 madvise 28 membarrier 324 mincore 27 mkdir 83 mkdirat 258 mlock 149 mlock2 "
    "325 mmap 9 mprotect 10 mremap 25 msync 26 munlock 150 munmap 11 nanosleep 35 newfstatat 262 open 2 openat 257 "
    "pause 34 pipe 22 pipe2 293 poll 7 ppoll 271 prctl 157 pread64 17 preadv 295 preadv2 327 prlimit64 302 pselect6 "
    "270 pwrite64 18 pwritev 296 pwritev2 328 read 0 readahead 187 readlink 89 readlinkat 267 readv 19 recvfrom 45 "
    "recvmsg 47 rename 82 renameat 264 renameat2 316 restart_syscall 219 rmdir 84 rseq 334 rt_sigaction 13 "
    "rt_sigpending 127 rt_sigprocmask 14 rt_sigreturn 15 rt_sigsuspend 130 rt_sigtimedwait 128 sched_get_priority_max "
    "146 sched_get_priority_min 147 sched_getaffinity 204 sched_getparam 143 sched_getscheduler 145 "
    "sched_rr_get_interval 148 sched_setaffinity 203 sched_yield 24 seccomp 317 select 23 sendfile 40 sendmsg 46 "
    "sendto 44 set_robust_list 273 set_tid_address 218 setitimer 38 setrlimit 160 shutdown 48 sigaltstack 131 "
    "signalfd 282 signalfd4 289 socketpair 53 stat 4 statfs 137 statx 332 symlink 88 symlinkat 266 sysinfo 99 tgkill "
    "234 time 201 timer_create 222 timer_delete 226 timer_getoverrun 225 timer_gettime 224 timer_settime 223 "
    "timerfd_create 283 timerfd_gettime 287 timerfd_settime 286 times 100 truncate 76 umask 95 uname 63 unlink 87 "
    "unlinkat 263 utime 132 utimensat 280 utimes 235 wait4 61 waitid 247 write 1 writev 20"
)
_AARCH64 = (
    "brk 214 capget 90 chdir 49 clock_getres 114 clock_gettime 113 clock_nanosleep 115 clone 220 close 57 close_range "
    "436 copy_file_range 285 dup 23 dup3 24 epoll_create1 20 epoll_ctl 21 epoll_pwait 22 epoll_pwait2 441 eventfd2 19 "
    "execve 221 exit 93 exit_group 94 faccessat 48 faccessat2 439 fadvise64 223 fchdir 50 fchmod 52 fchmodat 53 "
    "fchmodat2 452 fcntl 25 fdatasync 83 fgetxattr 10 flistxattr 13 fstat 80 fstatfs 44 fsync 82 ftruncate 46 futex "
    "98 futex_requeue 456 futex_wait 455 futex_waitv 449 futex_wake 454 get_mempolicy 236 get_robust_list 100 getcpu "
    "168 getcwd 17 getdents64 61 getegid 177 geteuid 175 getgid 176 getgroups 158 getitimer 102 getpeername 205 "
    "getpgid 155 getpid 172 getppid 173 getpriority 141 getrandom 278 getresgid 150 getresuid 148 getrlimit 163 "
    "getrusage 165 getsid 156 getsockname 204 getsockopt 209 gettid 178 gettimeofday 169 getuid 174 getxattr 8 ioctl "
    "29 kill 129 lgetxattr 9 linkat 37 listxattr 11 llistxattr 12 lseek 62 madvise 233 membarrier 283 mincore 232 "
    "mkdirat 34 mlock 228 mlock2 284 mmap 222 mprotect 226 mremap 216 msync 227 munlock 229 munmap 215 nanosleep 101 "
    "newfstatat 79 openat 56 pipe2 59 ppoll 73 prctl 167 pread64 67 preadv 69 preadv2 286 prlimit64 261 pselect6 72 "
    "pwrite64 68 pwritev 70 pwritev2 287 read 63 readahead 213 readlinkat 78 readv 65 recvfrom 207 recvmsg 212 "
    "renameat 38 renameat2 276 restart_syscall 128 rseq 293 rt_sigaction 134 rt_sigpending 136 rt_sigprocmask 135 "
    "rt_sigreturn 139 rt_sigsuspend 133 rt_sigtimedwait 137 sched_get_priority_max 125 sched_get_priority_min 126 "
    "sched_getaffinity 123 sched_getparam 121 sched_getscheduler 120 sched_rr_get_interval 127 sched_setaffinity 122 "
    "sched_yield 124 seccomp 277 sendfile 71 sendmsg 211 sendto 206 set_robust_list 99 set_tid_address 96 setitimer "
    "103 setrlimit 164 shutdown 210 sigaltstack 132 signalfd4 74 socketpair 199 statfs 43 statx 291 symlinkat 36 "
    "sysinfo 179 tgkill 131 timer_create 107 timer_delete 111 timer_getoverrun 109 timer_gettime 108 timer_settime "
    "110 timerfd_create 85 timerfd_gettime 87 timerfd_settime 86 times 153 truncate 45 umask 166 uname 160 unlinkat "
    "35 utimensat 88 wait4 260 waitid 95 write 64 writev 66"
)


_X86_64_OTHERS = (
    "accept 43 accept4 288 add_key 248 bind 49 bpf 321 capset 126 chown 92 chroot 161 connect 42 execveat 322 "
    "fallocate 285 fanotify_init 300 fchown 93 fchownat 260 finit_module 313 flock 73 fork 57 fsetxattr 190 "
    "init_module 175 inotify_add_watch 254 inotify_init 253 inotify_init1 294 io_setup 206 io_submit 209 ioperm 173 "
    "iopl 172 ioprio_set 251 kcmp 312 kexec_load 246 keyctl 250 lchown 94 listen 50 lsetxattr 189 mbind 237 "
    "memfd_create 319 migrate_pages 256 mknod 133 mknodat 259 mlockall 151 modify_ldt 154 mount 165 move_pages 279 "
    "mq_open 240 msgget 68 msgsnd 69 name_to_handle_at 303 open_by_handle_at 304 perf_event_open 298 personality 135 "
    "pivot_root 155 process_vm_readv 310 process_vm_writev 311 ptrace 101 reboot 169 recvmmsg 299 removexattr 197 "
    "request_key 249 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 sched_setparam 142 sched_setscheduler 144 semget 64 "
    "semop 65 sendmmsg 307 set_mempolicy 238 setgid 106 setgroups 116 sethostname 170 setns 308 setpgid "
    "109 setpriority 141 setregid 114 setresgid 119 setresuid 117 setreuid 113 setsid 112 setsockopt 54 setuid 105 "
    "setxattr 188 shmat 30 shmctl 31 shmget 29 socket 41 splice 275 sync 162 syncfs 306 syslog 103 tee 276 tkill 200 "
    "umount2 166 unshare 272 uselib 134 userfaultfd 323 vfork 58 vmsplice 278"
)
_AARCH64_OTHERS = (
    "accept 202 accept4 242 add_key 217 bind 200 bpf 280 capset 91 chroot 51 connect 203 execveat 281 fallocate 47 "
    "fanotify_init 262 fchown 55 fchownat 54 finit_module 273 flock 32 fsetxattr 7 init_module 105 inotify_add_watch "
    "27 inotify_init1 26 io_setup 0 io_submit 2 ioprio_set 30 kcmp 272 kexec_load 104 keyctl 219 listen 201 lsetxattr "
    "6 mbind 235 memfd_create 279 migrate_pages 238 mknodat 33 mlockall 230 mount 40 move_pages 239 mq_open 180 "
    "msgget 186 msgsnd 189 name_to_handle_at 264 open_by_handle_at 265 perf_event_open 241 personality 92 pivot_root "
    "41 process_vm_readv 270 process_vm_writev 271 ptrace 117 reboot 142 recvmmsg 243 removexattr 14 request_key 218 "
    "rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 sched_setparam 118 sched_setscheduler 119 semget 190 semop 193 "
    "sendmmsg 269 set_mempolicy 237 setgid 144 setgroups 159 sethostname 161 setns 268 setpgid 154 "
    "setpriority 140 setregid 143 setresgid 149 setresuid 147 setreuid 145 setsid 157 setsockopt 208 setuid 146 "
    "setxattr 5 shmat 196 shmctl 195 shmget 194 socket 198 splice 76 sync 81 syncfs 267 syslog 116 tee 77 tkill 130 "
    "umount2 39 unshare 97 userfaultfd 282 vmsplice 75"
)


def _numbers(table: str) -> dict[str, int]:
    words = table.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


MACHINES = {
    "x86_64": Machine(0xC000003E, _numbers(_X86_64), _numbers(_X86_64_OTHERS)),
    "aarch64": Machine(0xC00000B7, _numbers(_AARCH64), _numbers(_AARCH64_OTHERS)),
}


def name_of(number: int) -> str:
    """Return the name of a system call of this machine, or its number if it is in no list here."""
    machine = MACHINES[os.uname().machine]
    return next((name for name, one in [*machine.calls.items(), *machine.others.items()] if one == number), f"{number}")

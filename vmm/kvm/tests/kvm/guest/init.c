// The guest of the engine's tests: PID 1 without a C library. It says hello on the console, finds the port named
// ks.channel, and answers one-byte commands there:
//   c  adds one to a counter in memory and answers its 8 bytes
//   e  N  then N bytes: answers them (N is one byte)
//   w  N  writes a sector full of N to the root disk, past every cache; answers 1 byte, 0 = done
//   r  reads that sector, past every cache; answers 1 byte, its content (0xee when it is not uniform or unreadable)
//   d  N  dirties N MiB of memory with the present counter; answers 1 byte 0
//   s  answers the sum of the dirtied memory's first bytes, 8 bytes
//   f  gives the dirtied memory back to the kernel; answers 1 byte 0
//   t  answers CLOCK_MONOTONIC in nanoseconds, 8 bytes
//   n  sleeps 50 ms; answers 1 byte 0
//   v  answers the AVX register that it set at its start, 32 bytes
//   x  writes to the console for ever
//   p  panics the kernel by ending
typedef unsigned char u8;
typedef unsigned long u64;
typedef long i64;

static i64 sys(i64 n, i64 a, i64 b, i64 c, i64 d, i64 e, i64 f) {
    register i64 r10 __asm__("r10") = d;
    register i64 r8 __asm__("r8") = e;
    register i64 r9 __asm__("r9") = f;
    i64 r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return r;
}
#define S1(n, a) sys(n, (i64)(a), 0, 0, 0, 0, 0)
#define S2(n, a, b) sys(n, (i64)(a), (i64)(b), 0, 0, 0, 0)
#define S3(n, a, b, c) sys(n, (i64)(a), (i64)(b), (i64)(c), 0, 0, 0)
#define S4(n, a, b, c, d) sys(n, (i64)(a), (i64)(b), (i64)(c), (i64)(d), 0, 0)
enum { READ, WRITE, OPEN, CLOSE, POLL = 7, MMAP = 9, MUNMAP = 11, PREAD = 17, PWRITE = 18, MADVISE = 28, NANOSLEEP = 35, MKDIR = 83, MOUNT = 165, CLOCK_GETTIME = 228 };

static u64 length(const char *s) {
    u64 n = 0;
    while (s[n]) n++;
    return n;
}
static void say(const char *s) { S3(WRITE, 1, s, length(s)); }
static void nap(i64 ms) {
    i64 t[2] = {0, ms * 1000000};
    S2(NANOSLEEP, t, 0);
}
static u8 sector[4096] __attribute__((aligned(4096)));
static u64 counter;
static u8 *area;
static u64 area_bytes;

static int is_ours(const char *name) {
    char buffer[16];
    i64 fd = S3(OPEN, name, 0, 0);
    if (fd < 0) return 0;
    i64 n = S3(READ, fd, buffer, sizeof buffer);
    S1(CLOSE, fd);
    const char *want = "ks.channel\n";
    if (n != 11) return 0;
    for (int i = 0; i < 11; i++)
        if (buffer[i] != want[i]) return 0;
    return 1;
}

static i64 open_port(void) {
    static char name[] = "/sys/class/virtio-ports/vport0p1/name";
    static char dev[] = "/dev/vport0p1";
    for (;;) {
        for (char i = '0'; i < '8'; i++) {
            name[29] = i;
            dev[10] = i;
            if (is_ours(name)) {
                i64 fd = S3(OPEN, dev, 2, 0);
                if (fd >= 0) return fd;
            }
        }
        nap(20);
    }
}

// One byte from the port; waits while nobody is connected.
static u8 next(i64 fd) {
    u8 b;
    for (;;) {
        i64 n = S3(READ, fd, &b, 1);
        if (n == 1) return b;
        nap(10);
    }
}
static void answer(i64 fd, const void *p, u64 n) {
    const u8 *at = p;
    while (n) {
        i64 r = S3(WRITE, fd, at, n);
        if (r <= 0) return;
        at += r;
        n -= r;
    }
}

static u8 disk(int write, u8 value) {
    i64 fd = S3(OPEN, "/dev/vda", 2 | 040000 /* O_DIRECT */, 0);
    if (fd < 0) return 0xee;
    u8 result = 0;
    if (write) {
        for (int i = 0; i < 4096; i++) sector[i] = value;
        if (S4(PWRITE, fd, sector, 4096, 1 << 20) != 4096) result = 1;
    } else if (S4(PREAD, fd, sector, 4096, 1 << 20) != 4096) {
        result = 0xee;
    } else {
        result = sector[0];
        for (int i = 1; i < 4096; i++)
            if (sector[i] != result) result = 0xee;
    }
    S1(CLOSE, fd);
    return result;
}

static void command(i64 fd, u8 c) {
    u8 buffer[256], zero = 0;
    u64 value = 0;
    switch (c) {
    case 'c':
        counter++;
        answer(fd, &counter, 8);
        break;
    case 'e': {
        u8 n = next(fd);
        for (int i = 0; i < n; i++) buffer[i] = next(fd);
        answer(fd, buffer, n);
        break;
    }
    case 'w':
        buffer[0] = disk(1, next(fd));
        answer(fd, buffer, 1);
        break;
    case 'r':
        buffer[0] = disk(0, 0);
        answer(fd, buffer, 1);
        break;
    case 'd':
        area_bytes = (u64)next(fd) << 20;
        area = (u8 *)sys(MMAP, 0, area_bytes, 3, 0x22, -1, 0);
        for (u64 i = 0; i < area_bytes; i += 4096) area[i] = (u8)counter;
        answer(fd, &zero, 1);
        break;
    case 's':
        for (u64 i = 0; i < area_bytes; i += 4096) value += area[i];
        answer(fd, &value, 8);
        break;
    case 'f':
        S2(MUNMAP, area, area_bytes);
        area_bytes = 0;
        answer(fd, &zero, 1);
        break;
    case 't': {
        i64 t[2];
        S2(CLOCK_GETTIME, 1, t);
        value = (u64)t[0] * 1000000000 + (u64)t[1];
        answer(fd, &value, 8);
        break;
    }
    case 'n':
        nap(50);
        answer(fd, &zero, 1);
        break;
    case 'v':
        __asm__ volatile("vmovdqu %%ymm15, (%0)" ::"r"(buffer) : "memory");
        answer(fd, buffer, 32);
        break;
    case 'x':
        for (;;) say(".");
    case 'p':
        S1(60, 1);
    }
}

__attribute__((force_align_arg_pointer, used)) void start(void) {
    S2(MKDIR, "/dev", 0755);
    S2(MKDIR, "/sys", 0755);
    sys(MOUNT, (i64) "dev", (i64) "/dev", (i64) "devtmpfs", 0, 0, 0);
    sys(MOUNT, (i64) "sys", (i64) "/sys", (i64) "sysfs", 0, 0, 0);
    say("hello from init\n");
    static u8 pattern[32];
    for (int i = 0; i < 32; i++) pattern[i] = (u8)(0xa0 + i);
    __asm__ volatile("vmovdqu (%0), %%ymm15" ::"r"(pattern));
    i64 fd = open_port();
    say("port open\n");
    for (;;) command(fd, next(fd));
}
__asm__(".globl _start\n_start: xor %rbp, %rbp\n call start\n hlt\n");

/* Holds many streamed answers open and counts their chunks, at a microsecond or two each: for benchmarks whose client
 * shares the cores with the server. stream_load.py compiles and runs it.
 *
 *   stream_load HOST PORT REQUEST STREAMS -n ANSWERS [-w WORDS]    each stream asks again until so many are answered
 *   stream_load HOST PORT REQUEST STREAMS -t SECONDS [-w WORDS]    the same for so long, a second after all have begun
 *
 * REQUEST is a file with the whole HTTP request. WORDS has a word a line: a token whose text is " word" of line N was
 * made at a millisecond of CLOCK_MONOTONIC that is N modulo the number of lines; how old it is when it arrives at this
 * machine's socket is kept for one stream of eight, and how long it then waits for this program to read it. With -t, "begin" and "end" are printed when the measured time begins and ends, so that
 * others' CPU time can be read then; the streams begin a millisecond after each other, or -i SECONDS. The last line is
 * JSON.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_AGES (1 << 22)
#define LINE_HEAD 6 /* enough to know "data: " and the chunk of size 0 that ends an answer */

struct stream {
    int fd, number;
    int answering;      /* the head of the answer has been seen */
    int length;         /* of the present line, counted up to LINE_HEAD */
    int ends;           /* the line before was the last chunk's size */
    char head[LINE_HEAD];
    double asked;
    long tokens;        /* of the measured time */
};

static char *request;
static long request_size, num_answers, num_started, num_done, num_failed, num_begun;
static long long num_chunks, num_reads, num_bytes, num_tokens;
static double *first_ms, *ages_ms, *waits_ms;
static long num_first, num_ages, num_waits, num_words, max_first;
static double unix_time_ahead; /* of CLOCK_MONOTONIC */
static int counting = 1;

static double seconds_of(struct timespec t) {
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return seconds_of(t);
}

static double cpu(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static char *read_file(const char *path, long *size) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    char *data = malloc(*size + 1);
    if (!data || fread(data, 1, *size, file) != (size_t)*size) fail(path);
    data[*size] = 0;
    fclose(file);
    return data;
}

static void read_words(const char *path) {
    long size;
    char *words = read_file(path, &size);
    if (!hcreate(1 << 16)) fail("hcreate");
    for (char *word = strtok(words, "\n"); word; word = strtok(NULL, "\n")) {
        ENTRY entry = {word, (void *)(num_words++)};
        if (!hsearch(entry, ENTER)) fail("hsearch");
    }
}

/* The words of one data line, from its text to the quotation mark after it. */
static void take_words(struct stream *s, const char *line, const char *end, double at) {
    static const char *keys[] = {"\"text\":\"", "\"content\":\""};
    const char *text = NULL;
    for (int i = 0; i < 2 && !text; i++) {
        text = memmem(line, end - line, keys[i], strlen(keys[i]));
        if (text) text += strlen(keys[i]);
    }
    while (text && text < end && *text == ' ') {
        const char *word = ++text;
        while (text < end && *text != ' ' && *text != '"') text++;
        num_tokens++;
        s->tokens++;
        char copy[64];
        if (s->number % 8 || text - word >= (long)sizeof copy || num_ages >= MAX_AGES) continue;
        memcpy(copy, word, text - word);
        copy[text - word] = 0;
        ENTRY *found = hsearch((ENTRY){copy, NULL}, FIND);
        if (!found) continue;
        long age = ((long)(at * 1000) - (long)found->data) % num_words;
        ages_ms[num_ages++] = age < 0 ? age + num_words : age;
    }
}

static void ask(struct stream *s) {
    s->answering = s->length = s->ends = 0;
    s->asked = now();
    num_started++;
    if (write(s->fd, request, request_size) != request_size) fail("write");
}

static void connect_stream(struct stream *s, const char *host, int port, int poll) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) fail(host);
    s->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (s->fd < 0 || connect(s->fd, (void *)&address, sizeof address)) fail("connect");
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (num_words) setsockopt(s->fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
    fcntl(s->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
    epoll_ctl(poll, EPOLL_CTL_ADD, s->fd, &event);
    ask(s);
}

static void lose(struct stream *s, const char *why, const char *data, long size) {
    if (num_failed++ < 3) fprintf(stderr, "%s: %.*s\n", why, (int)(size > 400 ? 400 : size), data);
    close(s->fd);
    s->fd = -1;
    num_done++;
}

/* Goes through what was read line by line. */
static void take(struct stream *s, const char *data, long size, double at) {
    if (!s->answering) {
        s->answering = 1;
        num_begun++;
        if (num_first < max_first) first_ms[num_first++] = 1e3 * (at - s->asked);
        if (size < 12 || memcmp(data, "HTTP/1.1 200", 12)) {
            lose(s, "not answered", data, size);
            return;
        }
    }
    const char *end = data + size;
    while (data < end) {
        const char *line_end = memchr(data, '\n', end - data);
        const char *stop = line_end ? line_end : end;
        int whole = s->length == 0;
        for (const char *c = data; c < stop && s->length < LINE_HEAD; c++) s->head[s->length++] = *c;
        if (!line_end) return;
        if (s->length == LINE_HEAD && !memcmp(s->head, "data: ", LINE_HEAD) && counting) {
            num_chunks++;
            if (num_words && whole) take_words(s, data, stop, at);
        }
        int is_empty = s->length == 1 && s->head[0] == '\r';
        if (is_empty && s->ends) {
            num_done++;
            s->ends = 0;
            if (!num_answers || num_started < num_answers) ask(s);
            return;
        }
        s->ends = s->length == 2 && !memcmp(s->head, "0\r", 2);
        s->length = 0;
        data = line_end + 1;
    }
}

/* As read(). `arrived` becomes the moment at which the kernel had the last of it, where it says so. */
static long receive(int fd, char *data, size_t size, double *arrived) {
    char control[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec part = {data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    long got = recvmsg(fd, &message, 0);
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); got > 0 && each; each = CMSG_NXTHDR(&message, each)) {
        if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SO_TIMESTAMPNS) continue;
        struct timespec t;
        memcpy(&t, CMSG_DATA(each), sizeof t);
        *arrived = seconds_of(t) - unix_time_ahead;
    }
    return got;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(double *values, long count, double share) {
    if (!count) return -1;
    qsort(values, count, sizeof *values, ascending);
    long rank = (long)(count * share + 0.999999) - 1;
    return values[rank < 0 ? 0 : rank];
}

int main(int argc, char **argv) {
    double seconds = 0, interval = 1e-3;
    int option;
    while ((option = getopt(argc, argv, "n:t:w:i:")) != -1) {
        if (option == 'n') num_answers = atol(optarg);
        else if (option == 't') seconds = atof(optarg);
        else if (option == 'w') read_words(optarg);
        else if (option == 'i') interval = atof(optarg);
        else return 2;
    }
    if (argc - optind != 4 || (num_answers > 0) == (seconds > 0)) {
        fprintf(stderr, "stream_load HOST PORT REQUEST STREAMS -n ANSWERS | -t SECONDS [-w WORDS]\n");
        return 2;
    }
    const char *host = argv[optind];
    int port = atoi(argv[optind + 1]), streams = atoi(argv[optind + 3]);
    request = read_file(argv[optind + 2], &request_size);
    if (num_answers && streams > num_answers) streams = num_answers;
    max_first = num_answers ? num_answers : streams;
    struct stream *all = calloc(streams, sizeof *all);
    first_ms = calloc(max_first, sizeof *first_ms);
    ages_ms = calloc(MAX_AGES, sizeof *ages_ms);
    waits_ms = calloc(MAX_AGES, sizeof *waits_ms);
    /* Whatever comes between the two calls makes the difference too small. */
    for (int i = 0; i < 100; i++) {
        struct timespec unix_time;
        clock_gettime(CLOCK_REALTIME, &unix_time);
        double ahead = seconds_of(unix_time) - now();
        if (i == 0 || ahead > unix_time_ahead) unix_time_ahead = ahead;
    }
    int poll = epoll_create1(0), opened = 0;
    double began = now(), used = cpu(), settled = 0;
    counting = seconds == 0;
    int measuring = 0;
    static char data[1 << 18];
    for (;;) {
        /* Not all at once: a server that was asked a thousand times would be measured busy with that. */
        while (opened < streams && (!seconds || now() - began > opened * interval)) {
            all[opened].number = opened;
            connect_stream(&all[opened], host, port, poll);
            opened++;
            if (!seconds && opened % 16 == 0) break;
        }
        struct epoll_event events[256];
        int count = epoll_wait(poll, events, 256, opened < streams ? 1 : 100);
        double at = now();
        for (int i = 0; i < count; i++) {
            struct stream *s = events[i].data.ptr;
            double arrived = at;
            long size = num_words ? receive(s->fd, data, sizeof data, &arrived) : read(s->fd, data, sizeof data);
            if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (size <= 0) {
                lose(s, "closed", "", 0);
                continue;
            }
            if (counting) {
                num_reads++;
                num_bytes += size;
                if (num_words && s->number % 8 == 0 && num_waits < MAX_AGES) waits_ms[num_waits++] = 1e3 * (now() - arrived);
            }
            take(s, data, size, arrived);
        }
        if (num_answers && num_done >= num_answers) break;
        if (!seconds) continue;
        if (num_failed) break;
        if (!settled && num_begun >= streams) settled = at + 1;
        if (settled && !measuring && at >= settled) {
            measuring = counting = 1;
            began = at;
            used = cpu();
            puts("begin");
            fflush(stdout);
        } else if (measuring && at - began >= seconds) {
            break;
        }
    }
    double took = now() - began;
    used = cpu() - used;
    if (seconds) {
        puts("end");
        fflush(stdout);
    }
    double *of_stream = calloc(streams, sizeof *of_stream);
    for (int i = 0; i < streams; i++) of_stream[i] = all[i].tokens;
    printf("{\"seconds\": %.4f, \"answers\": %ld, \"failed\": %ld, \"chunks\": %lld, \"tokens\": %lld, \"reads\": %lld, "
           "\"bytes\": %lld, \"cpu_seconds\": %.4f, \"first_median_ms\": %.2f, \"first_p99_ms\": %.2f, "
           "\"age_median_ms\": %.1f, \"age_p99_ms\": %.1f, \"age_most_ms\": %.1f, \"wait_p99_ms\": %.2f, \"stream_median_tokens\": %.0f, "
           "\"stream_least_tokens\": %.0f}\n",
           took, num_done, num_failed, num_chunks, num_tokens, num_reads, num_bytes, used,
           percentile(first_ms, num_first, 0.5), percentile(first_ms, num_first, 0.99),
           percentile(ages_ms, num_ages, 0.5), percentile(ages_ms, num_ages, 0.99), percentile(ages_ms, num_ages, 1),
           percentile(waits_ms, num_waits, 0.99), percentile(of_stream, streams, 0.5), percentile(of_stream, streams, 0));
    return num_failed ? 1 : 0;
}

// Package hostileyaml has YAML documents that are made to take a parser's time, memory or log.
package hostileyaml

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	// mostMemory, in bytes, is what parsing may allocate. The largest document has 1 MB.
	mostMemory = 300 << 20
	// mostTime is the processor time that parsing may take.
	mostTime = 2 * time.Second
	// mostText, in bytes, is how long an error may be.
	mostText = 32 << 10
)

// documents returns the documents. key is a key that the parser knows and that has a text, listKey one that has a list.
func documents(key, listKey string) map[string]string {
	var aliases strings.Builder
	aliases.WriteString("a0: &a0 [x]\n")
	for i := range 9 {
		fmt.Fprintf(&aliases, "a%d: &a%d [%s]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 10))
	}
	repeat := func(value, alias string, n int) string {
		return key + ": &m " + value + "\n" + listKey + ": [" + strings.Repeat(alias+", ", n) + "]\n"
	}
	long := strings.Repeat("k", 100_000)
	return map[string]string{
		// The decoder compares each key of a mapping with all others, for each alias.
		"aliases of many keys":  repeat(flowMapping(9_990), "*m", 45),
		"aliases of some keys":  repeat(flowMapping(90), "*m", 1_100),
		"aliases of a few keys": repeat(flowMapping(9), "*m", 15_000),
		"aliases of long keys":  repeat("{"+long+"a: 1, "+long+"b: 1}", "*m", 90_000),
		"aliases of a text":     repeat(long, "{*m : *m}", 30_000),

		"equal keys":          strings.Repeat(key+": x\n", 9_000),
		"equal unknown keys":  strings.Repeat("x: y\n", 9_000),
		"equal nested keys":   key + ":\n" + strings.Repeat("  x: y\n", 9_000),
		"equal keys of lists": strings.Repeat("? [a]\n: b\n", 9_000),
		"unknown keys":        manyKeys(9_000),
		"very many keys":      manyKeys(50_000),
		"a long key":          strings.Repeat("k", 500_000) + ": x\n",
		"a long value":        key + ": [" + strings.Repeat("v", 500_000) + "]\n",
		"a long anchor":       key + ": *" + strings.Repeat("v", 500_000) + "\n",
		"a long line":         strings.Repeat(": ", 200_000),
		"many wrong items":    listKey + ": [" + strings.Repeat("{a: b}, ", 50_000) + "]\n",
		"deep lists":          key + ": " + strings.Repeat("[", 9_000),
		"deep tables":         key + ": " + strings.Repeat("{a: ", 9_000),
		"aliases of aliases":  aliases.String() + key + ": *a9\n",
		"an alias of itself":  key + ": &a [*a, *a]\n",
		"many documents":      strings.Repeat("---\n"+key+": x\n", 20_000),
		"many directives":     tagDirectives(8_000),
		"control characters":  key + ": \"" + strings.Repeat(`\x1b[31m`, 20_000) + "\"\n" + key + "x: 1\n",
		"equal keys in JSON":  `{"` + key + `": 1` + strings.Repeat(`, "`+key+`": 1`, 9_000) + "}",
	}
}

// flowMapping returns a mapping with keys of equal length, so that comparing them takes longest.
func flowMapping(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%s%05d: x, ", strings.Repeat("k", 40), i)
	}
	return "{" + b.String() + "}"
}

func tagDirectives(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%%TAG !%d! tag:x\n", i)
	}
	return b.String() + "---\n{}\n"
}

func manyKeys(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "unknown%d: x\n", i)
	}
	return b.String()
}

// Check has parse parse each document, of which none is valid, and checks that it returns an error, and what it costs.
// parse knows a key that has a text, and one that has a list.
func Check(t *testing.T, key, listKey string, parse func(data []byte) error) {
	t.Helper()
	for name, text := range documents(key, listKey) {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			start := processorTime(t)
			err := parse([]byte(text))
			if used := processorTime(t) - start; used > mostTime {
				t.Errorf("%s of processor time were used for %d KB", used, len(text)>>10)
			}
			runtime.ReadMemStats(&after)
			if used := after.TotalAlloc - before.TotalAlloc; used > mostMemory {
				t.Errorf("%d MB of memory were allocated for %d KB", used>>20, len(text)>>10)
			}
			switch {
			case err == nil:
				t.Error("the document is taken")
			case len(err.Error()) > mostText:
				t.Errorf("the error has %d bytes: %.200q", len(err.Error()), err)
			}
		})
	}
}

// processorTime is the time for which the thread has run. Other than the clock, it stands still while others run.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var ts unix.Timespec
	testenv.Must(t, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}

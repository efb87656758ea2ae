package manager

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/hoststate"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// What attacks may cost the manager.
const (
	mostTime   = 5 * time.Second // of a processor, in all attacks together
	mostAnswer = 64 << 10        // bytes of an answer
	mostLine   = 32 << 10        // bytes of a line in the log
	mostMemory = 200 << 20       // bytes that the manager's peak may grow by, in all attacks together
)

// attacker is a member of the API's group. It can send any bytes to the socket.
type attacker struct {
	*program
	socket string
}

// send sends bytes on one connection, and returns the answer. An attacker that sends endlessly is cut off by the
// manager, so errors of writing are expected.
func (a *attacker) send(parts ...string) string {
	a.Helper()
	conn, err := net.Dial("unix", a.socket)
	testenv.Must(a, err)
	defer conn.Close()
	testenv.Must(a, conn.SetDeadline(time.Now().Add(time.Minute)))
	go func() {
		for _, part := range parts {
			if _, err := io.WriteString(conn, part); err != nil {
				return
			}
		}
	}()
	answer, _ := io.ReadAll(io.LimitReader(conn, mostAnswer+1))
	if len(answer) > mostAnswer {
		a.Errorf("an answer of more than %d bytes begins with %.300q", mostAnswer, answer)
	}
	return string(answer)
}

// request is the text of a request with a body.
func request(method, path, body string) string {
	return fmt.Sprintf("%s %s HTTP/1.1\r\nHost: manager\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body)
}

// attacks are requests that must all be refused.
func attacks() map[string][]string {
	all := map[string][]string{}
	for _, group := range []map[string][]string{attacksOnHTTP(), attacksByPath(), attacksByJSON(), attacksByManifest()} {
		maps.Copy(all, group)
	}
	return all
}

// endless is longer than the manager reads.
func endless(text string) string { return strings.Repeat(text, 1<<20/len(text)) }

func attacksOnHTTP() map[string][]string {
	const (
		head   = "POST /v1/pods HTTP/1.1\r\nHost: m\r\n"
		chunks = head + "Transfer-Encoding: chunked\r\n"
	)
	return map[string][]string{
		"bytes that are no request":       {endless("\x00\xff\x1b[31m\n")},
		"a request line without an end":   {"GET /" + endless("x")},
		"headers without an end":          {head, endless("X-A: b\r\n")},
		"TLS":                             {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + endless("x")},
		"HTTP/2 with prior knowledge":     {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00"},
		"an upgrade to HTTP/2":            {"GET /x HTTP/1.1\r\nHost: m\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"},
		"two lengths":                     {head + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"},
		"a length and chunks":             {chunks + "Content-Length: 5\r\n\r\n0\r\n\r\n"},
		"a negative length":               {head + "Content-Length: -1\r\n\r\n"},
		"a body that does not come":       {head + "Content-Length: 100\r\n\r\n"},
		"a chunk of 16 EiB":               {chunks + "\r\nffffffffffffffff\r\nx"},
		"chunks without an end":           {chunks + "\r\n", endless("1\r\nx\r\n")},
		"trailers without an end":         {chunks + "\r\n0\r\n", endless("X-A: b\r\n")},
		"another request in the body":     {request("POST", "/v1/devices/free", request("POST", "/v1/pods", ""))},
		"a body above the maximum":        {request("POST", "/v1/pods", endless("a: b\n"))},
		"a method with a terminal's code": {request("\x1b[31m", "/v1/pods", "")},
	}
}

func attacksByPath() map[string][]string {
	one := func(method, path string) []string { return []string{request(method, path, "")} }
	long := strings.Repeat("x", 3_000)
	return map[string][]string{
		"a long path":                 one("DELETE", "/v1/pods/"+long+long),
		"a path of the host":          one("GET", "/v1/../../../etc/passwd"),
		"a path of the host, escaped": one("GET", "/v1/pods/..%2f..%2f..%2fetc%2fpasswd"),
		"a UID with a line break":     one("DELETE", "/v1/pods/a%0alevel=INFO%20msg=forged"),
		"a UID with terminal codes":   one("DELETE", "/v1/pods/%1b%5b2J%1b%5b31m"),
		"a UID that is not UTF-8":     one("DELETE", "/v1/pods/%ff%fe%00"),
		"a UID of line breaks":        one("DELETE", "/v1/pods/"+strings.Repeat("%0a", 2_300)),
		"a start with long names":     one("POST", "/v1/pods/"+long+"/containers/"+long+"/start"),
		"a start with line breaks":    one("POST", "/v1/pods/a%0ab/containers/c%0ad/start"),
	}
}

func attacksByJSON() map[string][]string {
	free := func(body string) []string { return []string{request("POST", "/v1/devices/free", body)} }
	long, deep := strings.Repeat("x", 200_000), strings.Repeat("[", 200_000)
	return map[string][]string{
		"a long field":               free(`{"` + long + `": true}`),
		"deep JSON":                  free(deep),
		"deep JSON in a known field": free(`{"deviceIds": ` + deep),
		"a huge number":              free(`{"all": 1e999999999}`),
		"all devices and some":       free(`{"all": true, "resourceName": "` + gpu + `", "deviceIds": ["0"]}`),
	}
}

func attacksByManifest() map[string][]string {
	manifest := func(text string) []string { return []string{request("POST", "/v1/pods", text)} }
	pod := func(name, container, count string) []string {
		return manifest(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "` + name + `"}, "spec": {"containers": [` +
			`{"name": "` + container + `", "resources": {"limits": {"` + gpu + `": ` + count + `}}}]}}`)
	}
	long, nines := strings.Repeat("x", 200_000), strings.Repeat("9", 200_000)
	container := `{"name": "c", "resources": {"limits": {"` + gpu + `": 1}}}`
	aliases := func(name string, n int) string { return "[" + strings.Repeat("*"+name+",", n) + "]\n" }
	annotations := func(keys, n int) []string {
		var b strings.Builder
		for i := range keys {
			fmt.Fprintf(&b, "key%05d: x, ", i)
		}
		return manifest("metadata:\n  labels: &a {" + b.String() + "}\n  annotations: " + aliases("a", n) + "kind: Pod\n")
	}
	return map[string][]string{
		"equal keys": manifest(strings.Repeat("kind: Pod\n", 25_000)),
		"aliases of aliases": manifest(
			"a: &a [x]\nb: &b " + aliases("a", 900) + "c: &c " + aliases("b", 900) + "kind: *c\n"),
		"aliases of many keys":         annotations(9_990, 45),
		"aliases of some keys":         annotations(90, 1_100),
		"aliases of few keys":          annotations(9, 15_000),
		"a deep manifest":              manifest(strings.Repeat("{a: ", 60_000)),
		"a pod of the host's path":     pod("../../etc/x", "main", "1"),
		"a pod with a line break":      pod(`a\nb`, "main", "1"),
		"a pod with a long name":       pod(long, "main", "1"),
		"a container like an option":   pod("a", "--privileged", "1"),
		"a container with a long name": pod("a", long, "1"),
		"a negative count":             pod("a", "main", "-1"),
		"more devices than there are":  pod("a", "main", "1000"),
		"the largest count":            pod("a", "main", "9223372036854775807"),
		"a count that overflows":       pod("a", "main", "1e30"),
		"a count of many digits":       pod("a", "main", `"`+nines+`"`),
		"a count with a huge exponent": pod("a", "main", `"1e999999999"`),
		"3,000 equal containers":       pod("a", `main"}, `+strings.Repeat(container+", ", 3_000)+`{"name": "last`, "1"),
	}
}

// attack sends all of them, and checks that each is refused.
func (a *attacker) attack(all map[string][]string) {
	a.Run("attacks", func(t *testing.T) {
		for name, parts := range all {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				answer := (&attacker{&program{T: t}, a.socket}).send(parts...)
				// Some connections are closed without an answer.
				if answer != "" && !strings.HasPrefix(answer, "HTTP/1.1 4") && !strings.HasPrefix(answer, "HTTP/1.1 5") {
					t.Errorf("it is not refused: %.300q", answer)
				}
				if strings.ContainsAny(answer, "\x1b\x00") {
					t.Errorf("the answer has control characters: %.300q", answer)
				}
				if _, err := a.api.Pods(t.Context()); err != nil {
					t.Errorf("the manager no longer answers: %v", err)
				}
			})
		}
	})
}

// TestAttacksOnTheAPI sends what a member of the API's group could send to harm the manager, its log, its host or other
// users. Nothing is placed or freed, each answer and each line of the log is short, and the manager goes on answering.
func TestAttacksOnTheAPI(t *testing.T) {
	t.Parallel()
	testenv.MountNamespace(t) // other tests mount meanwhile
	p := newProgram(t)
	p.start()
	p.plug(plugintest.New(gpu, plugintest.Devices(2)...), 2)
	if _, err := p.admit(t.Context(), "first", gpu, 1); err != nil {
		t.Fatal(err)
	}
	host, memory, used := p.hostState(), p.peakMemory(), p.processorTime()
	(&attacker{p, filepath.Join(p.dir, "api", "manager.sock")}).attack(attacks())
	host.Check(t)
	p.checkLog()
	if grown := p.peakMemory() - memory; grown > mostMemory {
		t.Errorf("the manager's memory grew by %d MB", grown>>20)
	}
	if used = p.processorTime() - used; used > mostTime {
		t.Errorf("the manager has used %s of processor time", used)
	}
	list, err := p.api.Pods(t.Context())
	if err != nil || len(list) != 1 || list[0].Metadata.UID != "first" || p.allocatable(gpu) != 2 {
		t.Errorf("the placements have changed: %+v, %v", list, err)
	}
	if _, err := p.admit(t.Context(), "second", gpu, 1); err != nil {
		t.Errorf("the free device can no longer be had: %v", err)
	}
}

// TestAttacksOnWithheldDevices frees what is not there while all devices are withheld. Nothing of it gets into the
// state, and no device becomes available.
func TestAttacksOnWithheldDevices(t *testing.T) {
	t.Parallel()
	testenv.MountNamespace(t) // other tests mount meanwhile
	p := newProgram(t)
	testenv.Must(t, os.MkdirAll(filepath.Join(p.dir, "state"), 0o700))
	testenv.Must(t, os.WriteFile(filepath.Join(p.dir, "state", "placements.json"), []byte("{"), 0o600))
	p.start()
	p.await("the damaged file is set aside", func() bool {
		list, err := p.api.Devices(t.Context())
		return err == nil && list.Withheld != nil
	})
	host := p.hostState()
	free := func(resource, ids string) []string {
		return []string{request("POST", "/v1/devices/free", `{"resourceName": "`+resource+`", "deviceIds": [`+ids+`]}`)}
	}
	a := &attacker{p, filepath.Join(p.dir, "api", "manager.sock")}
	a.attack(map[string][]string{
		"a resource without a plugin":    free("example.com/none", `"0"`),
		"a resource with a long name":    free(strings.Repeat("x", 200_000), `"0"`),
		"a resource with a line break":   free(`a\nlevel=INFO msg=forged`, `"b\nc"`),
		"many devices without a plugin":  free(gpu, strings.Repeat(`"a",`, 60_000)+`"a"`),
		"a device of a path of the host": free("../../etc/passwd", `"../../etc/shadow"`),
	})
	host.Check(t)
	p.plug(plugintest.New(gpu, plugintest.Devices(2)...), 0)
	p.await("the resource is recorded", func() bool {
		text, err := os.ReadFile(filepath.Join(p.dir, "state", "placements.json"))
		return err == nil && strings.Contains(string(text), gpu)
	})
	host = p.hostState()
	a.attack(map[string][]string{
		"a device that is not listed":            free(gpu, `"0", "none"`),
		"many devices that are not listed":       free(gpu, strings.Repeat(`"a",`, 60_000)+`"a"`),
		"a device with a long name":              free(gpu, `"`+strings.Repeat("x", 200_000)+`"`),
		"a device with a line break":             free(gpu, `"a\nlevel=INFO msg=forged"`),
		"a device that is listed, and all of it": {request("POST", "/v1/devices/free", `{"all": true, "deviceIds": ["0"]}`)},
	})
	host.Check(t)
	p.checkLog()
	if n := p.allocatable(gpu); n != 0 {
		t.Errorf("%d devices are available", n)
	}
}

// TestAFullAPIIsFreeAgain has a client open more connections than the manager takes, and send nothing. The manager
// closes them, and then others are answered.
func TestAFullAPIIsFreeAgain(t *testing.T) {
	t.Parallel()
	p := newProgram(t)
	p.start()
	for range 2000 {
		conn, err := net.DialTimeout("unix", filepath.Join(p.dir, "api", "manager.sock"), time.Second)
		if err != nil {
			continue // the queue of the socket is full
		}
		defer conn.Close()
	}
	p.await("others are answered", func() bool {
		_, err := p.api.Pods(t.Context())
		return err == nil
	})
}

// hostState is what the attacks must not change: the manager's state and sockets.
func (p *program) hostState() *hoststate.State {
	return hoststate.Take(p, filepath.Join(p.dir, "state"), p.plugins, filepath.Join(p.dir, "api"))
}

// checkLog checks that the log has only lines of the manager, none of them long.
func (p *program) checkLog() {
	p.Helper()
	text, err := os.ReadFile(p.log.Name())
	testenv.Must(p, err)
	for line := range bytes.Lines(text) {
		if !bytes.HasPrefix(line, []byte("time=")) || bytes.ContainsAny(line, "\x1b\x00") || len(line) > mostLine {
			p.Errorf("a line of the log has %d bytes: %.300q", len(line), line)
		}
	}
}

// peakMemory is the largest memory that the manager has used, in bytes.
func (p *program) peakMemory() int64 {
	p.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.process.Pid()), "status"))
	testenv.Must(p, err)
	_, peak, _ := strings.Cut(string(text), "VmHWM:")
	kib, err := strconv.ParseInt(strings.Fields(peak)[0], 10, 64)
	testenv.Must(p, err)
	return kib << 10
}

// processorTime is for how long the manager has run on processors. Other than the clock, it stands still while other
// programs run.
func (p *program) processorTime() time.Duration {
	p.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.process.Pid()), "stat"))
	testenv.Must(p, err)
	_, after, _ := strings.Cut(string(text), ") ") // the third field follows the program's name
	fields := strings.Fields(after)
	user, err := strconv.Atoi(fields[14-3])
	testenv.Must(p, err)
	system, err := strconv.Atoi(fields[15-3])
	testenv.Must(p, err)
	return time.Duration(user+system) * 10 * time.Millisecond // USER_HZ is 100
}

package kubelet_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/test/lib/testenv"
)

func read(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	testenv.Must(t, err)
	return data
}

// The file was written by a kubelet 1.36.3: a device on NUMA node 0, one on two nodes, one without topology.
func TestAKubeletsFileIsWrittenAgainByteForByte(t *testing.T) {
	want := read(t, "kubelet-1.36.json")
	c, err := kubelet.ParseCheckpoint(want)
	testenv.Must(t, err)
	got, err := c.Marshal()
	testenv.Must(t, err)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("the file (-want +got):\n%s", diff)
	}
}

// The kubelet writes null for no entries, and an object for no resources.
func TestAnEmptyCheckpoint(t *testing.T) {
	data, err := (&kubelet.Checkpoint{RegisteredDevices: map[string][]string{}}).Marshal()
	testenv.Must(t, err)
	const want = `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}`
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the file (-want +got):\n%s", diff)
	}
}

// A kubelet 1.10 wrote the content without a checksum.
func TestACheckpointWithoutChecksum(t *testing.T) {
	v1 := string(read(t, "kubelet-1.19.json"))
	bare := strings.TrimSuffix(strings.TrimPrefix(v1, `{"Data":`), `,"Checksum":3352954356}`)
	want, err := kubelet.ParseCheckpoint([]byte(v1))
	testenv.Must(t, err)
	got, err := kubelet.ParseCheckpoint([]byte(bare))
	testenv.Must(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestParseRefuses(t *testing.T) {
	v2, v1 := string(read(t, "kubelet-1.36.json")), string(read(t, "kubelet-1.19.json"))
	for name, c := range map[string]struct{ data, want string }{
		"another device": {
			strings.Replace(v2, `"GPU-1","GPU-0"`, `"GPU-1","GPU-2"`, 1),
			"the checksum does not match: the file says 3586343820, its content has 489764122",
		},
		"another order":              {strings.Replace(v2, `"GPU-1","GPU-0"`, `"GPU-0","GPU-1"`, 1), "does not match"},
		"another checksum":           {strings.Replace(v2, "3586343820", "3586343821", 1), "says 3586343821"},
		"another device before 1.20": {strings.Replace(v1, `"GPU-1","GPU-0"`, `"GPU-1","GPU-2"`, 1), "file says 3352954356"},
		"a file without its checksum": {
			strings.Replace(v1, `,"Checksum":3352954356`, "", 1), "the checksum does not match: the file says 0",
		},
		"entries that are none, of 1.10": {
			`{"PodDeviceEntries":7,"RegisteredDevices":{}}`, "parse the checkpoint of a kubelet before 1.11: json: ",
		},
		"entries of 1.10 with a checksum": {
			`{"PodDeviceEntries":[],"RegisteredDevices":{},"Checksum":1}`, "the checksum does not match: the file says 1",
		},
		"entries in both places": {
			`{"PodDeviceEntries":[],"Data":{"PodDeviceEntries":[],"RegisteredDevices":{}}}`, "the file says 0",
		},
		"no entries":    {`{}`, "the file says 0"},
		"half a file":   {v2[:len(v2)/2], "unexpected end of JSON input"},
		"an empty file": {"", "unexpected end of JSON input"},
		"no JSON":       {"\x00\x00", "invalid character"},
		"two files":     {v2 + v2, "after top-level value"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := kubelet.ParseCheckpoint([]byte(c.data))
			if err == nil || got != nil {
				t.Fatalf("got %v, want an error", got)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %q, want one with %q", err, c.want)
			}
			if errors.Is(err, kubelet.ErrChecksum) != strings.Contains(err.Error(), "does not match") {
				t.Errorf("the error %v is ErrChecksum: %v", err, errors.Is(err, kubelet.ErrChecksum))
			}
		})
	}
}

// The kubelet could not read such a file.
func TestMarshalRefusesNamesThatAreNotUTF8(t *testing.T) {
	c := kubelet.Checkpoint{RegisteredDevices: map[string][]string{"x/r": {"a\xff"}}}
	if data, err := c.Marshal(); err == nil || data != nil {
		t.Errorf("got %q and the error %v", data, err)
	}
}

func TestTheDevicesOfAllPodsInAnyCheckpoint(t *testing.T) {
	for name, c := range map[string]struct {
		data string
		want map[string]bool
	}{
		"of a kubelet": {
			string(read(t, "kubelet-1.36.json")), map[string]bool{"GPU-0": true, "GPU-1": true, "n0": true},
		},
		"with another checksum": {
			`{"Data":{"PodDeviceEntries":[{"DeviceIDs":{"-1":["a"]}}]},"Checksum":1}`, map[string]bool{"a": true},
		},
		"of a node without pods": {`{"Data":null}`, map[string]bool{}},
		"of a damaged file":      {`{`, nil},
		"of a kubelet 1.10": {
			`{"PodDeviceEntries":[{"DeviceIDs":["a"]}],"RegisteredDevices":{}}`, map[string]bool{"a": true},
		},
		"of a kubelet 1.19, with a wrong checksum": {
			`{"Data":{"PodDeviceEntries":[{"DeviceIDs":["a","b"]}]},"Checksum":1}`, map[string]bool{"a": true, "b": true},
		},
		"of a kubelet 1.19 without pods": {
			`{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}`, map[string]bool{},
		},
		"without content": {`{}`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			checkpoint, err := kubelet.ReadCheckpoint([]byte(c.data))
			var got map[string]bool
			if err == nil {
				got = map[string]bool{}
				for _, e := range checkpoint.PodDeviceEntries {
					for _, id := range e.IDs() {
						got[id] = true
					}
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" || (err == nil) != (c.want != nil) {
				t.Errorf("the error %v, device IDs (-want +got):\n%s", err, diff)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"kubelet-1.36.json", "kubelet-1.19.json"} {
		f.Add(read(f, name))
	}
	f.Add([]byte(`{"PodDeviceEntries":[{"DeviceIDs":["a"]}],"RegisteredDevices":{"x/r":["a"]}}`))
	f.Add([]byte(`{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := kubelet.ParseCheckpoint(data)
		if (c == nil) == (err == nil) {
			t.Fatalf("got the value %v and the error %v", c, err)
		}
		if err != nil {
			return
		}
		written, err := c.Marshal()
		testenv.Must(t, err)
		again, err := kubelet.ParseCheckpoint(written)
		if err != nil {
			t.Fatalf("%q is refused: %v", written, err)
		}
		if diff := cmp.Diff(c, again); diff != "" {
			t.Errorf("read again (-want +got):\n%s", diff)
		}
		if twice, err := again.Marshal(); err != nil || !bytes.Equal(written, twice) {
			t.Errorf("written again: %q and %v, want %q", twice, err, written)
		}
	})
}

package kubelet_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/test/lib/testenv"
)

// claimsOf returns a file with the data, whose checksum is wrong.
func claimsOf(t testing.TB, data string) []byte {
	t.Helper()
	text, err := json.Marshal(map[string]any{"Data": data, "Checksum": 1})
	testenv.Must(t, err)
	return text
}

const someClaims = `{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[
	{"ClaimUID":"c1","ClaimName":"train-gpus","Namespace":"team","PodUIDs":{"p2":{},"p1":{}},"DriverState":{
		"gpu.nvidia.com":{"Devices":[{"PoolName":"node1","DeviceName":"gpu-1","ShareID":null,"RequestNames":["gpus"],
			"CDIDeviceIDs":["nvidia.com/gpu=GPU-1"]}]},
		"nic.example.com":{"Devices":null}}},
	{"ClaimUID":"c2","ClaimName":"new","Namespace":"team","PodUIDs":{"p3":{}},"DriverState":{
		"gpu.nvidia.com":{"Devices":null}}}
]}`

func TestClaims(t *testing.T) {
	for name, c := range map[string]struct {
		data []byte
		want []kubelet.Claim
		err  string
	}{
		"a prepared claim, and one that is being prepared": {claimsOf(t, someClaims), []kubelet.Claim{
			{
				UID: "c1", Namespace: "team", Name: "train-gpus", Pods: []string{"p1", "p2"},
				Devices: map[string][]kubelet.ClaimDevice{"gpu.nvidia.com": {{Pool: "node1", Name: "gpu-1"}}},
			},
			{UID: "c2", Namespace: "team", Name: "new", Pods: []string{"p3"}, Devices: map[string][]kubelet.ClaimDevice{}},
		}, ""},
		"no claims": {
			claimsOf(t, `{"kind":"DRACheckpoint","ClaimInfoStateList":[]}`), []kubelet.Claim{}, "",
		},
		"of a kubelet before 1.32": {[]byte(`{"version":"v1","entries":[],"checksum":1}`), []kubelet.Claim{}, ""},
		"of a later kubelet":       {claimsOf(t, `{"kind":"Checkpoint2"}`), nil, `its kind is "Checkpoint2"`},
		"a claim twice": {
			claimsOf(t, `{"kind":"DRACheckpoint","ClaimInfoStateList":[{"ClaimUID":"c1"},{"ClaimUID":"c1"}]}`), nil,
			`it has the claim with the UID "c1" twice`,
		},
		"more than fits into memory": {
			claimsOf(t, `{"kind":"DRACheckpoint","ClaimInfoStateList":[`+strings.Repeat("{},", 300_000)+`{}]}`), nil,
			"it has 300003 objects, the limit is 200000",
		},
		"an empty file":                    {nil, nil, "unexpected end of JSON input"},
		"half a file":                      {claimsOf(t, someClaims)[:80], nil, "unexpected end of JSON input"},
		"data that is cut off":             {claimsOf(t, someClaims[:80]), nil, "unexpected end of JSON input"},
		"another file":                     {[]byte(`{}`), nil, "it has no Data"},
		"the checkpoint of device plugins": {[]byte(`{"Data":{"PodDeviceEntries":null}}`), nil, "cannot unmarshal object"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := kubelet.ParseClaims(c.data)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("the error is %v, want %q", err, c.err)
			}
		})
	}
}

func FuzzParseClaims(f *testing.F) {
	f.Add(claimsOf(f, someClaims))
	f.Add([]byte(`{"version":"v1","entries":[],"checksum":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := kubelet.ParseClaims(data)
		if (list == nil) == (err == nil) {
			t.Errorf("got %v and the error %v", list, err)
		}
	})
}

package api

import (
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

// document is specs/manager.openapi.yaml.
type document struct {
	t         *testing.T
	compiling sync.Mutex // clients ask from several goroutines
	compiler  *jsonschema.Compiler
	paths     map[string]any
}

func openDocument(t *testing.T) *document {
	t.Helper()
	data, err := os.ReadFile("../../specs/manager.openapi.yaml")
	testenv.Must(t, err)
	var root map[string]any
	testenv.Must(t, yaml.Unmarshal(data, &root))
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	testenv.Must(t, c.AddResource("api.json", instance(t, root)))
	return &document{t: t, compiler: c, paths: root["paths"].(map[string]any)}
}

// instance is a value as the schema's library takes it.
func instance(t *testing.T, v any) any {
	t.Helper()
	data, err := json.Marshal(v)
	testenv.Must(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	testenv.Must(t, err)
	return doc
}

// template is the path of the document that has a path.
func (d *document) template(path string) string {
	for template := range d.paths {
		want, got := strings.Split(template, "/"), strings.Split(path, "/")
		if slices.EqualFunc(want, got, func(w, g string) bool { return w == g || strings.HasPrefix(w, "{") }) {
			return template
		}
	}
	return ""
}

// check fails the test unless the document has the request and the answer.
func (d *document) check(q *http.Request, status int, contentType string, body []byte) {
	d.t.Helper()
	what := q.Method + " " + q.URL.Path + ": " + strconv.Itoa(status)
	template := d.template(q.URL.Path)
	item, _ := d.paths[template].(map[string]any)
	operation, _ := item[strings.ToLower(q.Method)].(map[string]any)
	switch {
	case item == nil && status == http.StatusNotFound, operation == nil && status == http.StatusMethodNotAllowed:
		d.checkError(what, contentType, body)
		return
	case operation == nil:
		d.t.Errorf("%s: the document has no such request", what)
		return
	}
	responses := operation["responses"].(map[string]any)
	answer, listed := responses[strconv.Itoa(status)].(map[string]any)
	switch {
	case !listed && status < 400:
		d.t.Errorf("%s: the document has no such status", what)
	case !listed:
		d.checkError(what, contentType, body)
	case answer["content"] == nil:
		if len(body) > 0 {
			d.t.Errorf("%s: the document has no body, got %s", what, body)
		}
	default:
		if _, ok := answer["content"].(map[string]any)[contentType]; !ok {
			d.t.Errorf("%s: the document does not have the type %q", what, contentType)
			return
		}
		if contentType != "application/json" && contentType != "application/x-ndjson" {
			return // any text
		}
		escaped := strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D")
		at := "#/paths/" + escaped.Replace(template) + "/" + strings.ToLower(q.Method) + "/responses/" +
			strconv.Itoa(status) + "/content/" + escaped.Replace(contentType) + "/schema"
		for line := range bytes.Lines(body) {
			d.validate(what, at, line)
		}
	}
}

// checkError fails the test unless the answer is that to a request that failed.
func (d *document) checkError(what, contentType string, body []byte) {
	d.t.Helper()
	if contentType != "application/json" {
		d.t.Errorf("%s: the document does not have the type %q", what, contentType)
	}
	d.validate(what, "#/components/schemas/Error", body)
}

// validate fails the test unless a body fulfils a schema.
func (d *document) validate(what, schema string, body []byte) {
	d.t.Helper()
	d.compiling.Lock()
	s, err := d.compiler.Compile("api.json" + schema)
	d.compiling.Unlock()
	if err != nil {
		d.t.Error(err)
		return
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		d.t.Errorf("%s: %v: %s", what, err, body)
		return
	}
	if err := s.Validate(doc); err != nil {
		d.t.Errorf("%s: %v\n%s", what, err, body)
	}
}

// checked checks each answer with the document.
type checked struct {
	document *document
	next     http.RoundTripper
}

func (c checked) RoundTrip(q *http.Request) (*http.Response, error) {
	answer, err := c.next.RoundTrip(q)
	if err != nil {
		return nil, err
	}
	contentType, _, _ := mime.ParseMediaType(answer.Header.Get("Content-Type"))
	if contentType == "application/x-ndjson" {
		answer.Body = &checkedLines{c.document, q, answer.Body}
		return answer, nil
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil {
		return nil, err
	}
	c.document.check(q, answer.StatusCode, contentType, body)
	answer.Body = io.NopCloser(bytes.NewReader(body))
	return answer, nil
}

// checkedLines checks each line as it is read: the server writes them one by one.
type checkedLines struct {
	document *document
	request  *http.Request
	io.ReadCloser
}

func (c *checkedLines) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	if n > 0 {
		c.document.check(c.request, http.StatusOK, "application/x-ndjson", p[:n])
	}
	return n, err
}

// The document has the requests that the server answers, and no others.
func TestTheDocumentHasTheRequests(t *testing.T) {
	served := []string{"GET /v1/watch", "POST /v1/leases"}
	for _, r := range routes {
		served = append(served, r.method+" "+r.path)
	}
	var documented []string
	for path, item := range openDocument(t).paths {
		for method := range item.(map[string]any) {
			if method != "parameters" {
				documented = append(documented, strings.ToUpper(method)+" "+path)
			}
		}
	}
	slices.Sort(served)
	slices.Sort(documented)
	if diff := cmp.Diff(served, documented); diff != "" {
		t.Errorf("served and documented (-served +documented):\n%s", diff)
	}
}

// All schemas of the document can be compiled: no reference leads nowhere.
func TestTheDocumentsSchemas(t *testing.T) {
	d := openDocument(t)
	for _, name := range []string{
		"Manifest", "FreeRequest", "Error", "Event", "ResourceList", "NodeStatus", "RunOptions",
		"LeaseRequest", "LeaseEvent", "LeaseList",
	} {
		if _, err := d.compiler.Compile("api.json#/components/schemas/" + name); err != nil {
			t.Error(err)
		}
	}
}

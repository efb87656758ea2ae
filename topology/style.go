package topology

import _ "embed"

// style has the colours of both themes. What knows no media queries shows the light one; the page has a colour of its own,
// so either can be read on any ground.
//
//go:embed style.css
var style string

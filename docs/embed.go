package docs

import "embed"

// Pages are the pages that the admin port serves under /docs/, with their pictures: an operator reads those of the
// release that runs.
//
//go:embed *.md *.svg *.png tandem.schema.json howto/*.md tutorial/*.md adr/*.md plots/*.svg
var Pages embed.FS

// Schema is the JSON Schema of the configuration, for editors.
//
//go:embed tandem.schema.json
var Schema []byte

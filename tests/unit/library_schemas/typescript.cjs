// JSON schemas that typescript-json-schema writes for the types of shapes.ts; its head has the command.
const path = require("node:path");
const TJS = require("typescript-json-schema");
const { version } = require("typescript-json-schema/package.json");

const file = path.join(__dirname, "shapes.ts");
const program = TJS.getProgramFromFiles([file], { strictNullChecks: true });
const schemas = {};
for (const required of [true, false]) {
  const settings = { required, noExtraProps: required, ref: true, titles: !required };
  const generator = TJS.buildGenerator(program, settings, [file]);
  for (const name of generator.getUserSymbols()) {
    const suffix = required ? "strict" : "plain";
    const schema = generator.getSchemaForSymbol(name);
    if (schema.type === "object") schemas[`${name}, ${suffix}`] = schema;
  }
}
console.log(JSON.stringify({ generator: `typescript-json-schema ${version}`, schemas }, null, 1));
